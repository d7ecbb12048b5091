#!/bin/bash
# From the folder above examples: bash examples/minimal/example.sh [old]
# `old` takes the names that the commands had at first.
set -e
python=${PYTHON:-python}
init=training.initialize_store worker=training.worker
if [ "$1" = old ]; then init=initialize_logdir worker=worker; fi

folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
echo "Logging in $folder"
$python -m gradkeep.compat.datamodels.$init \
    --logging.logdir="$folder" \
    --logging.spec=examples/minimal/spec.json

$python -m gradkeep.compat.datamodels.$worker \
    --worker.index=0 \
    --worker.main_import=examples.minimal.train_minimal \
    --worker.logdir="$folder" \
    --trainer.multiple=2

$python -m examples.minimal.check "$folder" 2
