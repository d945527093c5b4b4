#!/bin/sh
# Write the shards of ImageNet from the folders train and val, as torchvision unpacks them, with their indexes:
# make_shards.sh /data/imagenet /data/imagenet-shards
set -eu
mkdir -p "$2"
for split in train val; do
    wds-datapipes create imagenet "$1" --split "$split" --shuffle --rekey '{name}' --index --resume \
        --maxcount "${SAMPLES_PER_SHARD:-1000}" -o "$2/$split-%06d.tar"
done
