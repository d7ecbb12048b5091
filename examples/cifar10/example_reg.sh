#!/bin/bash
# From the folder above examples: bash examples/cifar10/example_reg.sh FOLDER [FLAGS OF THE REGRESSION]
set -e
python=${PYTHON:-python}
folder=$1
shift
$python -m gradkeep.compat.datamodels.regression.write_dataset \
    --cfg.data_dir "$folder" \
    --cfg.out_path "$folder/reg_data.beton" \
    --cfg.y_name margins \
    --cfg.x_name masks

$python -m gradkeep.compat.datamodels.regression.compute_datamodels \
    -C examples/cifar10/regression_config.yaml \
    --data.data_path "$folder/reg_data.beton" \
    --cfg.out_dir "$folder/reg_results" "$@"
echo "Datamodels are in $folder/reg_results/datamodels.pt"
