"""``python -m mgpu``, and the command ``mgpu``."""
import sys


def main() -> int | None:
    """Run the command line; returns the exit status.

    ``--version`` and ``doctor`` need no package but NumPy. Every other
    command says which ones to install.
    """
    try:
        from mgpu.cli import cli
        return cli(prog_name="mgpu")
    except ImportError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in ("click", "rich"):
            raise
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        import mgpu
        print(f"mgpu, version {mgpu.__version__}")
        return 0
    if arguments in (["doctor"], ["doctor", "--format", "json"],
                     ["doctor", "--json"]):
        from mgpu.tools import doctor
        return doctor.report(as_json=len(arguments) > 1)
    print(f"Error: the command line needs {missing}. Run "
          "pip install click rich tqdm.", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
