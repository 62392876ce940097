"""``python3 -m sg_rlhf.doctor``: `sg-rlhf doctor`; without the packages, the preflight."""

import sys


def main() -> int:
    """Run the doctor, or the preflight if a package is missing or Python is too old."""
    try:
        from sg_rlhf.doctor import command
    except (ImportError, SyntaxError):
        if sys.argv[1:]:
            from sg_rlhf.__main__ import main as run_command

            return run_command(["doctor", *sys.argv[1:]])
        from sg_rlhf.doctor import preflight

        return preflight.main()
    return command.main()


if __name__ == "__main__":
    sys.exit(main())
