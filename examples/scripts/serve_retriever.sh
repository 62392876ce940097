#!/usr/bin/env bash
# The retrieval server, from a corpus file to an address that answers.
#
#   bash examples/scripts/serve_retriever.sh --corpus corpus.jsonl [flags]    builds a BM25 index first
#   bash examples/scripts/serve_retriever.sh --index DIR [flags]              an index that is there
#
# Flags are those of `sg-rlhf serve --help`.
#
#   SG_ENCODER=bm25|MODEL   for the index of --corpus (bm25)
#   SG_INDEX_DIR=DIR        where that index goes (data/indexes/<corpus>-<encoder>)
set -euo pipefail
here=$PWD
cd "$(dirname "$0")/../.."
root=$PWD
./scripts/bootstrap.sh
sg_rlhf=$root/.venv/bin/sg-rlhf
cd "$here" # paths in the flags are the caller's

index='' corpus=''
previous=''
for argument in "$@"; do
  case $previous in
    --corpus) corpus=$argument ;;
  esac
  case $argument in
    --index | --index=* | --faiss-index | --faiss-index=* | -h | --help) index=given ;;
    --corpus=*) corpus=${argument#*=} ;;
  esac
  previous=$argument
done
if [[ -z $index && -n $corpus ]]; then
  encoder=${SG_ENCODER:-bm25}
  name=$(basename "$corpus" .jsonl)-$(basename "$encoder")
  out=${SG_INDEX_DIR:-$root/data/indexes/$name}
  "$sg_rlhf" index --corpus "$corpus" --encoder "$encoder" --out "$out"
  set -- --index "$out" "$@"
fi
exec "$sg_rlhf" serve "$@"
