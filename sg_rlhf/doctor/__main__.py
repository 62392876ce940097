"""The command as a module: ``python -m sg_rlhf.doctor``; without the packages, the preflight."""

import sys


def main() -> int:
    """Run the doctor, or the preflight if a package is missing or Python is too old."""
    try:
        from sg_rlhf.doctor import command
    except (ImportError, SyntaxError) as error:
        if sys.argv[1:] or str(getattr(error, "name", "")).startswith("sg_rlhf"):
            raise
        from sg_rlhf.doctor import preflight

        return preflight.main()
    return command.main()


if __name__ == "__main__":
    sys.exit(main())
