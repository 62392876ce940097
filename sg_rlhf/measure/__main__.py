from sg_rlhf.measure.command import main

if __name__ == "__main__":
    raise SystemExit(main())
