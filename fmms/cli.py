"""The `fmms` command: parses the command line and hands over to fmms.run, fmms.report, fmms.doctor and
fmms.notebooks. Errors that a user can put right are printed without a traceback."""

import argparse
import sys

from fmms._version import __version__


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 fine, 1 something failed, 2 a mistake in the call."""
    options = _parser().parse_args(arguments)
    from fmms.notebooks import NotebookError

    try:
        return options.command(options)
    except (NotebookError, OSError, ValueError) as error:
        print(f"fmms: {error}", file=sys.stderr)
        # A missing checkout is a mistake in the call; a folder or disk that refuses is not.
        ours = not isinstance(error, OSError) or (isinstance(error, FileNotFoundError) and not error.filename)
        return 2 if ours else 1
    except KeyboardInterrupt:
        print("\nfmms: stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fmms", description="Fused matmul sampling: notebooks, report, machine check."
    )
    parser.add_argument("--version", action="version", version=f"fmms {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        help="run notebooks and render the report",
        description="Runs notebooks with a profile's parameters. What is up to date is skipped, a failure doesn't keep "
        "the others from running, and a stopped run continues when started again.",
    )
    run.add_argument("names", nargs="*", metavar="NAME", help="00, 00_environment or a path; all notebooks without one")
    _profile(run)
    run.add_argument(
        "-p",
        dest="overrides",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a notebook parameter (value as in YAML)",
    )
    run.add_argument("--force", action="store_true", help="run also what is up to date")
    run.add_argument(
        "--timeout", type=float, metavar="S", help="seconds that one notebook may take (default: no limit)"
    )
    run.set_defaults(command=_run)

    report = commands.add_parser("report", help="render the HTML of executed notebooks and the index again")
    _profile(report)
    report.set_defaults(command=_report)

    doctor = commands.add_parser("doctor", help="say what this machine can run, and how to mend what is missing")
    doctor.add_argument("--profile", help="the profile to judge for (default: h200 with a GPU, cpu without)")
    doctor.set_defaults(command=_doctor)

    lint = commands.add_parser("lint-notebooks", help="check that notebooks are without outputs and well-formed")
    lint.add_argument("--fix", action="store_true", help="remove outputs and execution counts first")
    lint.set_defaults(command=_lint)
    return parser


def _profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", default="cpu", help="which set of sizes: cpu (default) or h200")


def _run(options: argparse.Namespace) -> int:
    from fmms import run
    from fmms.notebooks import NotebookError

    overrides = {}
    for text in options.overrides:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise NotebookError(f"-p {text}: expected NAME=VALUE, for instance -p seed=3")
        overrides[name.strip()] = value
    return run.run(options.names, options.profile, overrides, options.force, options.timeout)


def _report(options: argparse.Namespace) -> int:
    from fmms import report

    faults = []
    print(report.render(options.profile, faults))
    for fault in faults:
        print(f"fmms: {fault}", file=sys.stderr)
    return int(bool(faults))


def _doctor(options: argparse.Namespace) -> int:
    from fmms import doctor

    return doctor.main(options.profile)


def _lint(options: argparse.Namespace) -> int:
    from fmms import notebooks

    faults = 0
    for path in notebooks.find():
        if options.fix and notebooks.clear(path):
            print(f"{path.name}: cleared")
        for fault in notebooks.lint(path):
            print(f"{path.name}: {fault}")
            faults += 1
    return int(faults > 0)
