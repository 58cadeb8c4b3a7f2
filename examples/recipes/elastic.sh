#!/usr/bin/env bash
# Lose a rank, add one, and train on: the GPT of train_gpt.py on four Gloo ranks of this host.
#
#   examples/recipes/elastic.sh [options of elastic.py]
#
# What a user does by hand, `kill` and the command that adds a rank, is shown behind a `$`.
set -euo pipefail
set -m # each job below is a process group of its own, which can be ended as a whole
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
output=$(mktemp)

end() {
    for group in $(jobs -p); do kill -9 -- "-$group" 2> /dev/null || true; done
    rm -f "$output"
}
trap end EXIT

wait_for() { # a line of the output, while training runs
    until grep -q "$1" "$output"; do
        kill -0 %1
        sleep 0.2
    done
}

python -m examples.recipes.elastic --ranks 4 "$@" 2>&1 | tee "$output" &

wait_for "4 ranks:"
wait_for "step  50"
victim=$(grep -m 1 "4 ranks:" "$output" | sed "s/.*:\([0-9]*\),[^,]*$/\1/") # the last but one
echo "\$ kill -9 $victim"
kill -9 "$victim"

wait_for "3 ranks:"
join=$(grep -m 1 "To add a rank:" "$output" | sed "s/To add a rank: //")
echo "\$ $join"
eval "$join" &

wait %1
wait # for the rank that was added
