date +%T
export PYTHONPATH=$PWD/.gpu-data:$PYTHONPATH
t() { # t NAME RANKS LIMIT PYTEST-ARGS
  n=$1; r=$2; l=$3; shift 3
  s=$(date +%s)
  timeout -k 5 $l mpiexec $MPIFLAGS -n $r python3 -m mpi4py -m pytest -p onlygpu --with-mpi -m mpi --timeout 150 -p no:cacheprovider -q --durations=4 "$@" > $OUT/$n.txt 2>&1
  echo "$n rc $? $(( $(date +%s) - s )) s: $(tail -40 $OUT/$n.txt | grep -aE 'passed|failed|error' | tail -1)"
}
s() { n=$1; l=$2; shift 2; timeout -k 5 $l python3 -m pytest -p onlygpu --timeout 150 -p no:cacheprovider -q --durations=4 "$@" > $OUT/$n.txt 2>&1; echo "$n rc $?: $(tail -40 $OUT/$n.txt | grep -aE 'passed|failed|error' | tail -1)"; }
(
t dense 2 100 tests/collectives/test_cuda_dense_p2p.py tests/oktopk/test_dense_on_gpus.py tests/oktopk/test_torch_dense.py
t codec 2 60 tests/collectives/test_codec_kernels.py tests/oktopk/test_levels.py tests/oktopk/test_device_kernels.py
t passes 2 80 tests/jobs/train/test_passes.py tests/jobs/train/test_placement.py tests/oktopk/test_gradients_in_place.py tests/oktopk/test_gradient_tensors.py
) &
(
t rows 2 100 tests/oktopk/test_rows.py tests/collectives/test_row_kernels.py tests/oktopk/test_tables.py
t buckets 2 120 tests/oktopk/test_buckets_peers.py tests/oktopk/test_overlap.py tests/oktopk/test_ddp_hook.py tests/oktopk/test_deferred_peers.py
) &
(
t executors 2 220 tests/oktopk/test_executors.py
) &
(
s single 120 tests/collectives/test_row_kernels.py tests/collectives/test_codec_kernels.py tests/oktopk/test_device_kernels.py tests/jobs/train/test_speech.py tests/jobs/train/test_passes.py
s ranks 90 tests/jobs/train/test_ranks.py
) &
wait
date +%T
t soak 2 45 tests/oktopk/test_soak.py
date +%T
