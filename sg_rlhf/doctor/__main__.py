"""``python3 -m sg_rlhf.doctor``: `sg-rlhf doctor`; without the packages, the preflight."""

import sys


def main() -> int:
    """Run the doctor, or the preflight if a package is missing or Python is too old."""
    try:
        from sg_rlhf.doctor import command
    except (ImportError, SyntaxError) as error:
        if sys.argv[1:]:
            from sg_rlhf.common.environment import with_packages

            remedy = with_packages(["-m", "sg_rlhf", "doctor", *sys.argv[1:]])
            print(f"error: {' '.join(str(error).split())}; {remedy}", file=sys.stderr)
            return 2
        from sg_rlhf.doctor import preflight

        return preflight.main()
    return command.main()


if __name__ == "__main__":
    sys.exit(main())
