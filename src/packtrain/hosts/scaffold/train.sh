#!/usr/bin/env bash
# ms-swift on packs. Written by `packtrain init`; runs in ms-swift's environment, with packtrain installed.
{by}
set -euo pipefail
{root_line}swift sft \
  --model {model} \{template_line}
  --dataset {data} \
  --output_dir {out} \
  --packing true \
  --packing_length {pack_length} \
  --max_length {pack_length} \
  --attn_impl sdpa \
  --per_device_train_batch_size 32 \
  --gradient_accumulation_steps 1 \
  --num_train_epochs 1 \
  --learning_rate 1e-5 \
  --split_dataset_ratio 0 \
  --external_plugins "$(dirname "$0")/packtrain_plugin.py" "$@"
