#!/usr/bin/env bash
# Once on a login node of Alps, after `make setup`: the folders on scratch, striped as CSCS's Lustre guide says, and the
# packages beside the image, installed by one job of minutes. A second call changes nothing but the packages. Options go to
# install.py.
# Not yet run on Alps.
set -euo pipefail
cd "$(dirname "$0")/../.."

: "${ALPS_ACCOUNT:?export ALPS_ACCOUNT=PROJECT first, one of: $(id -Gn)}"
: "${SCRATCH:?is set at login on Alps}"
# Where $SCRATCH is SSDs (Clariden), sequential writes belong here; on Daint both are one. train.toml mounts both.
large=${CAPSTOR_SCRATCH:-/capstor/scratch/cscs/$USER}/tokenscale
fast=$SCRATCH/tokenscale

mkdir -p results "$large"/runs "$fast"/{corpus,tokens} "$SCRATCH"/.edf_imagestore
# small files on one storage target, large ones over many; files that are there already stay as they are
for folder in "$large"/runs "$fast"/{corpus,tokens} "$SCRATCH"/.edf_imagestore; do
    lfs setstripe -E 4M -c 1 -E 64M -c 4 -E -1 -c 32 -S 4M "$folder"
done
for target in "$large"/runs "$fast"/{corpus,tokens}; do
    link=results/${target##*/}
    if [ -L "$link" ] || [ ! -e "$link" ]; then
        ln -sfn "$target" "$link"
    else
        echo "$link is a folder and stays where it is; CSCS asks jobs to write to $target" >&2
    fi
done

# the Container Engine pulls the image at this first use
export TOKENSCALE_ROOT=$PWD
srun --account="$ALPS_ACCOUNT" --partition=debug --nodes=1 --time=30 \
    --environment="$PWD/profiles/alps/train.toml" python profiles/alps/install.py "$@"
