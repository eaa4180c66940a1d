#!/usr/bin/env bash
# The proof that the plugin works with a vLLM: the ranks of one pipeline on this machine, each in a network namespace
# (root), joined by veth pairs and a bridge; all modes on one server, alternated through the switch file.
#
#   proof.sh VENV MODEL cpu DTYPE                 CPU ranks; MODEL of a small vocabulary (2,000 or more)
#   proof.sh VENV MODEL cuda DTYPE [RATE...]      one GPU each; then the load at each RATE of tc (none, 1gbit, ...)
#
# STAGES=3 in the environment makes three ranks, of which two send; the default is 2.
# VENV has the vLLM, and its version must be in `versions.py` (add the line first: the proof decides whether it stays).
# Fails when the answers of the modes differ from each other or, in float32, from those without the plugin; when a byte
# is sent that should have been saved; when a model with a hidden size of 4096 or more, whose handoffs outweigh all
# other messages, does not send less than 0.55 of the bytes on the link; or when the plugin stayed out. Logs and answers
# are kept; their folder is named.
set -euo pipefail
stages=${STAGES:-2}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$1 model=$2 device=$3 dtype=$4
shift 4
out=$(mktemp -d)
echo "logs and answers: $out"

# The checkout's plugin as an installed one: the package, and the entry point by which vLLM finds it.
about=$out/site/ppdeploy_handoff-0.dist-info
mkdir -p "$about"
cp -r "$here/../src/ppdeploy_handoff" "$out/site/"
printf 'Metadata-Version: 2.1\nName: ppdeploy-handoff\nVersion: 0\n' > "$about/METADATA"
printf '[vllm.general_plugins]\nppdeploy_handoff = ppdeploy_handoff.plugin:register\n' > "$about/entry_points.txt"

ranks=() hub=handoffhub
for number in $(seq 0 $((stages - 1))); do ranks+=("handoff$number"); done
# shellcheck disable=SC2329  # by the trap below
stop() {
  local name pid
  for name in "${ranks[@]}" $hub; do
    # One may have ended since it was listed.
    for pid in $(ip netns pids "$name"); do kill -KILL "$pid" 2> "$out/kill.log" || true; done
    ip netns del "$name"
  done
}
for name in "${ranks[@]}" $hub; do ip netns add "$name"; done
trap stop EXIT
ip -n $hub link add switch type bridge
ip -n $hub link set switch up
for number in "${!ranks[@]}"; do
  name=${ranks[number]}
  ip link add v0 netns "$name" type veth peer name "$name" netns $hub
  ip -n $hub link set "$name" master switch up
  ip -n "$name" addr add "192.0.2.$((number + 1))/24" dev v0
  ip -n "$name" link set lo up
  ip -n "$name" link set v0 up
done
head=${ranks[0]}

mode() { echo "$*" > "$out/mode"; }
mode off
rank() { # NUMBER ARGUMENT...
  local number=$1
  local space=${ranks[number]}
  shift
  local own=(VLLM_CPU_OMP_THREADS_BIND="$((number % $(nproc)))" VLLM_CPU_KVCACHE_SPACE=1)
  if [ "$device" = cuda ]; then
    own=(CUDA_VISIBLE_DEVICES="$number" NCCL_HOSTID="$space" NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_IB_DISABLE=1
      NCCL_NVLS_ENABLE=0 NCCL_SOCKET_IFNAME==v0)
  fi
  # Its own shared memory and IPC, as on a host of its own.
  ip netns exec "$space" unshare --uts --ipc --mount bash -c 'mount -t tmpfs tmpfs /dev/shm; exec "$@"' rank \
    env "${own[@]}" VLLM_HOST_IP="192.0.2.$((number + 1))" GLOO_SOCKET_IFNAME=v0 PYTHONPATH="$out/site" \
    PPDEPLOY_HANDOFF=off PPDEPLOY_HANDOFF_SWITCH="$out/mode" HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 \
    VLLM_NO_USAGE_STATS=1 VLLM_ENGINE_READY_TIMEOUT_S=3000 VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=1500 \
    "$venv/bin/vllm" serve "$model" --served-model-name m --dtype "$dtype" --no-enable-prefix-caching \
    --pipeline-parallel-size "$stages" --nnodes "$stages" --node-rank "$number" --master-addr 192.0.2.1 --master-port 29501 \
    "${sized[@]}" "$@" > "$out/rank$number.log" 2>&1 &
}
# On CPUs without --enforce-eager, which breaks pipelines there, and without a C++ compiler.
sized=(--max-model-len 2048 --max-num-batched-tokens 256 -cc.mode=2 -cc.backend=eager)
asked=(1900 5 100 1000) plain=(--plain) overlap=overlap
if [ "$device" = cuda ]; then
  sized=(--max-model-len 8192 --max-num-batched-tokens 2048)
  asked=() plain=() overlap=overlap:64
fi
rank 0 --host 0.0.0.0 --port 8000
for number in $(seq 1 $((stages - 1))); do rank "$number" --headless; done
for _ in $(seq 1 600); do
  ip netns exec "$head" curl -sf -m 3 -o "$out/health" http://127.0.0.1:8000/health && break
  [ "$(jobs -pr | wc -l)" = "$stages" ] || { tail -n 20 "$out"/rank?.log; exit 1; }
  sleep 2
done
grep -h ppdeploy_handoff "$out"/rank?.log

counters() { ip netns exec "$head" curl -sf http://127.0.0.1:8000/metrics | grep '^ppdeploy_handoff_.*_total'; }
wire() { ip -n "$head" -s -j link show v0 | grep -o '"tx":{"bytes":[0-9]*' | grep -o '[0-9]*$'; }
for name in off off-again lossless "$overlap"; do
  mode "${name%-again}"
  before=$(wire)
  ip netns exec "$head" "$venv/bin/python" "$here/equal.py" "${plain[@]}" "$out/$name.json" "${asked[@]}"
  sent=$(($(wire) - before))
  echo "$sent" > "$out/$name.bytes"
  echo "$name: the head sent $sent bytes on its link, control messages and all"
  counters | tee "$out/$name.counters"
done

failed=0
value() { awk -v name="ppdeploy_handoff_$1_total" '$1 == name {print $2 + 0}' "$out/$2.counters"; }
[ "$(value handoffs off-again)" = 0 ] || { echo "FAILED: handoffs were changed with the mode off"; failed=1; }
[ "$(value handoffs lossless)" != 0 ] || { echo "FAILED: the plugin stayed out"; failed=1; }
[ "$(value bytes_sent "$overlap")" = "$(value bytes_saved "$overlap")" ] || { echo "FAILED: not half the bytes"; failed=1; }
hidden=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["hidden_size"])' "$model/config.json")
for name in lossless "$overlap"; do
  share=$(awk -v off="$(cat "$out/off-again.bytes")" -v on="$(cat "$out/$name.bytes")" 'BEGIN {printf "%.3f", on / off}')
  echo "$name: $share of the bytes that the head sends without the plugin"
  [ "$hidden" -lt 4096 ] || awk -v share="$share" 'BEGIN {exit share > 0.55}' || { echo "FAILED: more than 0.55"; failed=1; }
done
[ "$(value handoffs "$overlap")" != "$(value handoffs lossless)" ] || { echo "FAILED: no overlap"; failed=1; }
same() { python3 "$here/same.py" "$out/$1.json" "$out/$2.json"; }
same off off-again || echo "(vLLM alone differs from run to run here)"
same lossless "$overlap" || { echo "FAILED: the modes differ"; failed=1; }
if [ "$dtype" = float32 ]; then
  same off lossless || { echo "FAILED: float32 is not exact"; failed=1; }
else
  same off lossless || echo "(one norm a stage boundary rounds otherwise: docs/handoff.md)"
fi

for rate in "$@"; do
  for space in "${ranks[@]}"; do
    # The first time there is none.
    ip netns exec "$space" tc qdisc del dev v0 root 2> "$out/tc.log" || true
    [ "$rate" = none ] || ip netns exec "$space" tc qdisc add dev v0 root tbf rate "$rate" burst 256kb latency 50ms
  done
  for chosen in off "$overlap" "overlap:64 128" "overlap:256 512"; do
    mode "$chosen"
    ip netns exec "$head" "$venv/bin/python" "$here/load.py" "$rate,${chosen// /,}" 32 1024 128 96 "$RANDOM"
  done
done
[ $failed = 0 ] && echo "PROVED: $("$venv/bin/python" -c 'import vllm; print(vllm.__version__)') on $device, $stages stages"
exit $failed
