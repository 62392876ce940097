"""The command as a module: ``python -m sg_rlhf.doctor``; without the packages, the preflight."""

import sys

try:
    from sg_rlhf.doctor.command import main
except (ImportError, SyntaxError) as error:  # a package is missing, or Python is too old
    if sys.argv[1:] or str(getattr(error, "name", "")).startswith("sg_rlhf"):
        raise
    from sg_rlhf.doctor.preflight import main

if __name__ == "__main__":
    sys.exit(main())
