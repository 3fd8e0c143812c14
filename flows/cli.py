"""The command line. Every command's work is imported when it is asked for, never for ``--help``."""

import json
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from flows.environment import set_defaults

app = typer.Typer(
    name="ratchet",
    help="RL post-training of language models as discrete, committed, resumable stages.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Such as update.lr=1e-5.")
]
RunUrl = Annotated[str, typer.Argument(metavar="RUN", help="A run's path or URL.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
AllowChange = Annotated[
    bool, typer.Option("--allow-change", help="Go on with a configuration that changes numbers.")
]
Debug = Annotated[bool, typer.Option("--debug", help="All workers in this process.")]


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    run: Annotated[str | None, typer.Option("--run", help="Name of the run.")] = None,
    allow_change: AllowChange = False,
    debug: Debug = False,
) -> None:
    """Start a run, or go on with it."""
    from flows.config import load_config
    from flows.launch import launch

    named = [f"run={json.dumps(run)}"] if run else []
    launch(load_config(config, [*(overrides or []), *named]), debug, allow_change)


@app.command()
def resume(
    run: RunUrl,
    overrides: Overrides = None,
    allow_change: AllowChange = False,
    debug: Debug = False,
) -> None:
    """Go on from what is committed."""
    from flows.launch import launch
    from flows.record import config_of

    launch(config_of(run_url(run), overrides or []), debug, allow_change)


@app.command()
def branch(
    parent: RunUrl,
    overrides: Overrides = None,
    *,
    iteration: Annotated[int, typer.Option(min=1, help="Whose policy it goes on from.")],
    run: Annotated[str, typer.Option("--run", help="Name of the new run.")],
) -> None:
    """Make a run that goes on from another's policy, sharing what came before."""
    from flows.branch import branch as make_branch

    url = make_branch(run_url(parent), iteration, run, overrides or [])
    print(f"{url} goes on from iteration {iteration} of {parent}: ratchet resume {url}")


@app.command()
def rescore(
    run: RunUrl,
    *,
    reward: Annotated[
        list[str], typer.Option(metavar="SPEC", help="file.py:fn or a built-in, =WEIGHT; or YAML.")
    ],
    new: Annotated[str, typer.Option("--run", help="Name of the new run.")],
    iterations: Annotated[
        str | None, typer.Option(metavar="A:B", help="First and last; default: all finished.")
    ] = None,
    verdict: Annotated[float, typer.Option(help="A sample is right from this reward on.")] = 0.5,
    debug: Debug = False,
    as_json: AsJson = False,
) -> None:
    """Score stored rollouts with other rewards, in a run that branches there."""
    from flows.rescore import print_rescore

    print_rescore(run_url(run), reward, new, iterations, verdict, debug, as_json)


@app.command()
def replay(
    run: RunUrl,
    overrides: Overrides = None,
    *,
    iteration: Annotated[int, typer.Option(min=1, help="Whose update.")],
    debug: Debug = False,
    as_json: AsJson = False,
) -> None:
    """Make an update again from its inputs; exits 3 where a metric or a weight differs."""
    from flows.replay import print_replay

    print_replay(run_url(run), iteration, overrides or [], debug, as_json)


@app.command()
def status(run: RunUrl, as_json: AsJson = False) -> None:
    """Show what is committed, iteration by iteration and stage by stage."""
    from flows.status import run_status, status_table

    found = run_status(run_url(run))
    _show(found, status_table, as_json)


@app.command()
def plan(config: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Show derived sizes and check them. Starts nothing."""
    from flows.config import load_config
    from flows.plan import make_plan

    rows = make_plan(load_config(config, overrides or [])).table()
    if as_json:
        print(json.dumps({name: value for name, value, _ in rows}, indent=1))
        return
    from flows.tables import print_table

    print_table(["size", "value", "from"], rows)


@app.command()
def stage(
    name: Annotated[str, typer.Argument(metavar="rollout|score|update")],
    run: RunUrl,
    iteration: Annotated[int, typer.Option(min=1, help="Which iteration.")],
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Of score: samples whose reward failed, again.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Run one stage alone, from its committed inputs."""
    from flows.launch import run_stage
    from flows.record import config_of

    run_stage(config_of(run_url(run), []), name, iteration, debug, retry_errors)


@app.command()
def samples(
    run: RunUrl,
    iteration: Annotated[int | None, typer.Option(min=1, help="Default: the newest.")] = None,
    where: Annotated[str | None, typer.Option(help='SQL, such as "reward > 0.5".')] = None,
    sort: Annotated[str | None, typer.Option(help='SQL, such as "reward desc".')] = None,
    limit: Annotated[int, typer.Option(min=1, help="Rows.")] = 10,
    evaluation: Annotated[
        int | None, typer.Option(min=0, metavar="POLICY", help="Of its newest evaluation.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look at rollouts with their rewards."""
    from flows.look import print_samples

    print_samples(run_url(run), iteration, where, sort, limit, as_json, evaluation)


@app.command()
def evaluate(
    target: Annotated[str, typer.Argument(metavar="MODEL|RUN", help="A folder or a run's URL.")],
    overrides: Overrides = None,
    *,
    data: Annotated[str | None, typer.Option(help="Held-out prompts; default: the run's.")] = None,
    iteration: Annotated[
        int | None, typer.Option(min=0, help="Its policy; default: the newest.")
    ] = None,
    num_samples: Annotated[
        int | None, typer.Option("--samples", min=1, help="Of a prompt.")
    ] = None,
    k: Annotated[str | None, typer.Option(metavar="K,K", help="Of pass@k, such as 1,4,8.")] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="A greedy answer too, or alone.")
    ] = False,
    reward: Annotated[
        list[str] | None, typer.Option(metavar="SPEC", help="As of rescore; default: the run's.")
    ] = None,
    to: Annotated[str | None, typer.Option(metavar="URL", help="Run that a model gets.")] = None,
    debug: Debug = False,
    as_json: AsJson = False,
) -> None:
    """Answer held-out prompts: pass@k and rewards, as artifacts."""
    from flows.evaluate import Asked, print_evaluation

    asked = Asked(data, num_samples, k, greedy, reward or [])
    url = run_url(target)
    print_evaluation(url, asked, iteration, to, overrides or [], debug, as_json)


@app.command()
def export(
    run: RunUrl,
    to: Annotated[str, typer.Option(help="Folder to make.")],
    iteration: Annotated[int | None, typer.Option(min=1, help="Default: the newest.")] = None,
    debug: Debug = False,
) -> None:
    """Write a policy as a plain Hugging Face folder."""
    from flows.export import export_policy
    from flows.record import config_of

    export_policy(config_of(run_url(run), []), to, iteration, debug)


@app.command()
def verify(run: RunUrl, as_json: AsJson = False) -> None:
    """Recompute every digest, row count and invariant; exits 3 with a list of what is wrong."""
    from flows.verify import print_verification

    print_verification(run_url(run), as_json)


@app.command()
def gc(
    run: RunUrl,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="last=N, every=K, best=METRIC[:N], version=V or all (the default); repeatable.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing.")] = False,
    pin: Annotated[int | None, typer.Option(min=1, help="Only pin this policy.")] = None,
    unpin: Annotated[str | None, typer.Option(metavar="NAME", help="Only remove a pin.")] = None,
    as_json: AsJson = False,
) -> None:
    """Remove the bytes that no kept policy needs. Manifests stay."""
    from flows import gc as collecting
    from flows.config import UserError

    url, others = run_url(run), bool(keep) or dry_run
    if [others, pin is not None, unpin is not None].count(True) > 1:
        raise UserError("--pin, --unpin and a collection (--keep, --dry-run) go one at a time")
    if pin is not None:
        collecting.pin(url, pin)
    elif unpin is not None:
        collecting.unpin(url, unpin)
    else:
        collecting.print_collection(url, keep or [], dry_run, as_json)


@app.command()
def doctor(
    config: Annotated[str | None, typer.Argument(metavar="[CONFIG]")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what works here, and what to do about what does not."""
    from flows.doctor import print_findings

    print_findings(config, as_json)


def run_url(run: str) -> str:
    """A run as the user names it, as a URL or an absolute path."""
    import os

    return run.rstrip("/") if "://" in run else os.path.abspath(run)


def _show(found: Any, table: Callable[[Any], None], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        table(found)


def main() -> None:
    """Entry point: exceptions to one sentence and an exit code."""
    set_defaults()
    # A plain SIGTERM would leave the Prefect run RUNNING for ever.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except Exception as error:
        sys.exit(_explain(error))


def _explain(error: Exception) -> int:
    """Print what went wrong; returns the exit code."""
    from artifacts.errors import (
        HeldError,
        IntegrityError,
        LeaseLostError,
        RetiredError,
        StoreError,
        UrlError,
    )
    from flows.config import UserError
    from stages.contract import StageError

    known = (
        (UserError, 2),
        (RetiredError, 2),
        (UrlError, 2),
        (IntegrityError, 3),
        (HeldError, 4),
        (LeaseLostError, 4),
        (StageError, 1),
        (StoreError, 1),
    )
    for kind, code in known:
        if isinstance(error, kind):
            print(f"ratchet: {error}", file=sys.stderr)
            return code
    import traceback

    from artifacts.secrets import redacted

    print(redacted("".join(traceback.format_exception(error))), file=sys.stderr, end="")
    return 1
