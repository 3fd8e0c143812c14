"""How trainer ranks are laid out: dp x sp. Ranks of one row share each sequence, rows share out the
samples, and weights are sharded over all ranks.

Rank r is in row r // sp, so ranks that share a sequence are neighbours: all-to-alls stay on a host.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stages.sequence_parallel import SequenceRanks


@dataclass(frozen=True)
class RankMesh:
    """Where this rank is among the others.

    Attributes:
        device: this rank's.
        everyone: all ranks, which weights are sharded over and gradients summed over.
        dp_rank, num_dp: this rank's row, and how many there are: each takes samples of its own.
        dp_group: one rank of each row. Whatever ranks of a row hold alike is summed over it.
        sequence: the ranks of this row; None where it is this rank alone.
    """

    device: torch.device
    everyone: DeviceMesh
    dp_rank: int
    num_dp: int
    dp_group: dist.ProcessGroup
    sequence: SequenceRanks | None = None

    @classmethod
    def of(cls, device: torch.device, sp: int) -> "RankMesh":
        """The ranks of the process group that was joined, ``sp`` of them a sequence. Collective."""
        world = dist.get_world_size()
        assert world % sp == 0, f"{world} ranks, {sp} of them a sequence"
        everyone = init_device_mesh(device.type, (world,), mesh_dim_names=("ranks",))
        if sp == 1:
            return cls(device, everyone, dist.get_rank(), world, everyone.get_group())
        grid = init_device_mesh(device.type, (world // sp, sp), mesh_dim_names=("dp", "sp"))
        dp = grid["dp"]
        return cls(
            device,
            everyone,
            dp.get_local_rank(),
            dp.size(),
            dp.get_group(),
            SequenceRanks.of(grid["sp"]),
        )

    def tokens_per_row(self, max_tokens_per_rank: int) -> int:
        """The budget of a micro-batch: its ranks hold a slice of it each."""
        return max_tokens_per_rank * (1 if self.sequence is None else self.sequence.size)
