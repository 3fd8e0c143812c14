"""What every test process needs before any library is imported."""

import os
import sys
from pathlib import Path

from flows.environment import set_defaults

set_defaults()
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))
