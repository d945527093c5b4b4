#!/bin/sh
# Write the shards of ImageNet from the folders train and val, as torchvision unpacks them, with their indexes:
# make_shards.sh /data/imagenet /data/imagenet-shards
set -eu
mkdir -p "$2"
for split in train val; do
    classes=$([ "$split" = train ] || echo "--classes-from=$2/train-classes.json")
    wds-datapipes create images "$1/$split" ${classes:+"$classes"} --shuffle --rekey '{name}' --index --resume \
        --maxcount "${SAMPLES_PER_SHARD:-1000}" -o "$2/$split-%06d.tar"
done
