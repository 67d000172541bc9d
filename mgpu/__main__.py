"""``python -m mgpu``, and the command ``mgpu``."""
import sys


def main() -> int | None:
    """Run the command line; the exit status."""
    try:
        from mgpu.cli import cli
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("click", "rich"):
            raise
        print(f"Error: the command line needs {error.name}. Run "
              "pip install 'mgpu[cli]'.", file=sys.stderr)
        return 2
    return cli(prog_name="mgpu")


if __name__ == "__main__":
    sys.exit(main())
