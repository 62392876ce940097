"""The command as a module: ``python -m sg_rlhf.doctor``."""

from sg_rlhf.doctor.command import main

if __name__ == "__main__":
    raise SystemExit(main())
