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
echo "   value R²: how much of the variance of returns the mean return of like states in other rollouts predicts; 1: all,"
echo "   0: no more than the group's mean, below 0: less; coverage: steps that have such states.  A singleton has none."
echo "   history 2: also the two observations before a step are compared."
$BIPACE report "$DATA/webshop_llm.jsonl.gz" "$DATA/alfworld_scripted.jsonl.gz" "$DATA/textcraft_scripted.jsonl.gz" --out "$OUT" --html
echo
echo "Next, your own rollouts, one JSON object per step (docs/data.md): $BIPACE report mine.jsonl --out out/mine --html"
