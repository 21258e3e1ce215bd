#!/bin/sh
# The demo: advantages and a comparison of partitions on the sample rollouts of examples/data/.
#   BIPACE   how to call the program; default: bipace
#   OUT      folder of the results; default: out/demo
set -eu
cd "$(dirname "$0")/.."
BIPACE=${BIPACE:-bipace}
OUT=${OUT:-out/demo}
DATA=examples/data

echo "1. Advantages of Config.gae() (n-gram states) for logs of real language models on WebShop"
$BIPACE advantage "$DATA/webshop_llm.jsonl.gz" --preset gae --out "$OUT/webshop_advantage.parquet"
echo
echo "2. Which partition of states is best?  Real models on WebShop; scripted policies on ALFWorld and TextCraft"
$BIPACE report "$DATA/webshop_llm.jsonl.gz" "$DATA/alfworld_scripted.jsonl.gz" "$DATA/textcraft_scripted.jsonl.gz" --out "$OUT" --html
echo
echo "Next, your own rollouts, one JSON object per step (docs/data.md): $BIPACE report mine.jsonl --out out/mine --html"
