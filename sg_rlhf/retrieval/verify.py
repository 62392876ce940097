"""Check every byte of an index: `sg-rlhf verify-index --index DIR`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sg_rlhf.common.argument_types import path
from sg_rlhf.retrieval import command, manifest

PROG = "sg-rlhf verify-index"
EPILOG = """\
examples:
  sg-rlhf verify-index --index indexes/e5_flat
  sg-rlhf verify-index --index indexes/e5_flat --corpus /elsewhere/wiki-18.jsonl

Exit status 0: index and corpus are as they were built. 2: they are not; one line names the first
difference.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (0, or 2 for damage and bad input)."""
    parser = command.parser(PROG, "Check every byte of a search index and its corpus.", EPILOG)
    add = parser.add_argument
    add("--index", type=path, required=True, metavar="DIR", help="folder of the index (required)")
    add("--corpus", type=path, metavar="FILE", help="corpus (default: where the index says)")
    args = parser.parse_args(argv)

    def verify() -> None:
        facts = manifest.read(args.index, every_byte=True)
        manifest.check_corpus(args.index, facts["corpus"], args.corpus, every_byte=True)
        size = sum(facts["files"].values())
        print(
            f"{args.index}: every byte is as it was built ({len(facts['files'])} files, "
            f"{size:,} bytes; corpus, {facts['corpus']['bytes']:,} bytes)"
        )

    return command.run(PROG, verify)


if __name__ == "__main__":
    sys.exit(main())
