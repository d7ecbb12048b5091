#!/bin/bash
# From the folder above examples: bash examples/cifar10/example.sh FOLDER [FLAGS OF train_cifar.py]
# JOBS models are trained at a time, each on its own GPU if there are some; SPEC names another spec.
# Stopped and run again, it trains what is not done.
set -e
python=${PYTHON:-python} jobs=${JOBS:-1} spec=${SPEC:-examples/cifar10/spec.json}
folder=$1
shift
mkdir -p "$folder"
if [ ! -e "$folder/_completed.npy" ]; then
    $python -m gradkeep.compat.datamodels.training.initialize_store \
        --logging.logdir="$folder" \
        --logging.spec="$spec"
fi
models=$($python -c "import json, sys; print(json.load(open(sys.argv[1]))['num_models'])" "$spec")

seq 0 $((models - 1)) | xargs -P "$jobs" -I INDEX \
    $python -m gradkeep.compat.datamodels.training.worker \
    --worker.index=INDEX \
    --worker.main_import=examples.cifar10.train_cifar \
    --worker.logdir="$folder" "$@"

echo "masks.npy, margins.npy and _completed.npy are in $folder"
