#!/usr/bin/env bash
# The proof that the plugin works with a vLLM: the ranks of one pipeline on this machine, each in a network namespace
# (root), joined by veth pairs and a bridge; all modes on one server, alternated through the switch file.
#
#   proof.sh VENV MODEL cpu DTYPE [RATE...]       CPU ranks; MODEL of a vocabulary of 2,000 or more
#   proof.sh VENV MODEL cuda DTYPE [RATE...]      one GPU each
#
# then the load at each RATE of tc (none, 1gbit, ...).
#
# From the environment:
#   STAGES=2       ranks, of which all but the last send
#   GPUS="0 1"     what each rank sees (CUDA_VISIBLE_DEVICES); one may serve two ranks
#   TENSOR=1       tensor parallel size of a rank
#   ARGS=""        more arguments of every `vllm serve`; ENVS="" more of its environment
#   RUNS="32x1024x128x96@off ..."  for each RATE: users x prompt tokens x answer tokens x requests, and the mode, with
#                  the most tokens of a batch where these are less than vLLM's: overlap,512
#   KILL=""        seconds to watch the head after the last rank was killed under load; then all start anew
#   TEXT=""        a file of prose that the model, a real one, did not see: how well each mode says it (quality.py)
#   SPACES=handoff  how the network namespaces' names begin, for two proofs side by side
# VENV has the vLLM, and its version must be in `versions.py` (add the line first: the proof decides whether it stays).
# Fails when the answers of the modes differ from each other (unless vLLM's own differ from run to run, also for prompts
# that were alone) or, in float32, from those without the plugin (fp8 is compared with itself alone); when a byte
# is sent that should have been saved; when a model with a hidden size of 4096 or more, whose handoffs outweigh all
# other messages, does not send less than 0.55 of the bytes on the link, 0.30 with fp8; or when the plugin stayed out.
# Logs and answers are kept; their folder is named.
set -euo pipefail
stages=${STAGES:-2} tensor=${TENSOR:-1} spaces=${SPACES:-handoff}
read -ra gpus <<< "${GPUS:-$(seq -s ' ' 0 $((stages - 1)))}"
usual=32x1024x128x96
read -ra runs <<< "${RUNS:-$usual@off $usual@overlap $usual@overlap,128 $usual@overlap,512}"
read -ra arguments <<< "${ARGS:-}"
read -ra environment <<< "${ENVS:-}"
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

ranks=() hub=${spaces}hub
for number in $(seq 0 $((stages - 1))); do ranks+=("$spaces$number"); done
# What runs in a namespace, at once. One process may have ended since it was listed.
end() { # NAMESPACE
  local pid
  for pid in $(ip netns pids "$1"); do kill -KILL "$pid" 2> "$out/kill.log" || true; done
}
# shellcheck disable=SC2329  # by the trap below
stop() {
  local name
  for name in "${ranks[@]}" "$hub"; do
    end "$name"
    ip netns del "$name"
  done
}
for name in "${ranks[@]}" "$hub"; do ip netns add "$name"; done
trap stop EXIT
ip -n "$hub" link add switch type bridge
ip -n "$hub" link set switch up
for number in "${!ranks[@]}"; do
  name=${ranks[number]}
  ip link add v0 netns "$name" type veth peer name "$name" netns "$hub"
  ip -n "$hub" link set "$name" master switch up
  ip -n "$name" addr add "192.0.2.$((number + 1))/24" dev v0
  ip -n "$name" link set lo up
  ip -n "$name" link set v0 up
done
head=${ranks[0]}

of_model() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$model/config.json" "$1"; }
hidden=$(of_model hidden_size) vocabulary=$(of_model vocab_size)

mode() { echo "$*" > "$out/mode"; }
mode off
rank() { # NUMBER ARGUMENT...
  local number=$1
  local space=${ranks[number]}
  shift
  local own=(VLLM_CPU_OMP_THREADS_BIND="$((number % $(nproc)))" VLLM_CPU_KVCACHE_SPACE=1)
  if [ "$device" = cuda ]; then
    own=(CUDA_VISIBLE_DEVICES="${gpus[number]}" NCCL_HOSTID="$space" NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_IB_DISABLE=1
      NCCL_NVLS_ENABLE=0 NCCL_SOCKET_IFNAME==v0)
  fi
  # Its own shared memory and IPC, as on a host of its own.
  ip netns exec "$space" unshare --uts --ipc --mount bash -c 'mount -t tmpfs tmpfs /dev/shm; exec "$@"' rank \
    env "${own[@]}" VLLM_HOST_IP="192.0.2.$((number + 1))" GLOO_SOCKET_IFNAME=v0 PYTHONPATH="$out/site" \
    PPDEPLOY_HANDOFF=off PPDEPLOY_HANDOFF_SWITCH="$out/mode" HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 \
    VLLM_NO_USAGE_STATS=1 VLLM_ENGINE_READY_TIMEOUT_S=3000 VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=1500 "${environment[@]}" \
    "$venv/bin/vllm" serve "$model" --served-model-name m --dtype "$dtype" --no-enable-prefix-caching \
    --pipeline-parallel-size "$stages" --nnodes "$stages" --node-rank "$number" --master-addr 192.0.2.1 --master-port 29501 \
    --tensor-parallel-size "$tensor" "${sized[@]}" "${arguments[@]}" "$@" > "$out/rank$number.log" 2>&1 &
}
# On CPUs without --enforce-eager, which breaks pipelines there, and without a C++ compiler.
sized=(--max-model-len 2048 --max-num-batched-tokens 256 -cc.mode=2 -cc.backend=eager)
prompts=(1900 5 100 1000) plain=(--plain) overlap=overlap short=fp8
if [ "$device" = cuda ]; then
  sized=(--max-model-len 8192 --max-num-batched-tokens 2048)
  prompts=() plain=() overlap=overlap:64 short=fp8:64
fi
health() { ip netns exec "$head" curl -s -m 3 -o "$out/health" -w '%{http_code}' http://127.0.0.1:8000/health; }
start() {
  local number begun=$SECONDS
  rank 0 --host 0.0.0.0 --port 8000
  for number in $(seq 1 $((stages - 1))); do rank "$number" --headless; done
  for _ in $(seq 1 1200); do
    [ "$(health)" != 200 ] || { echo "serves after $((SECONDS - begun)) s"; return; }
    [ "$(jobs -pr | wc -l)" = "$stages" ] || break
    sleep 1
  done
  tail -n 40 "$out"/rank?.log
  return 1
}
start
grep -h ppdeploy_handoff "$out"/rank?.log

counters() { ip netns exec "$head" curl -sf http://127.0.0.1:8000/metrics | grep '^ppdeploy_handoff_.*_total'; }
wire() { ip -n "$head" -s -j link show v0 | grep -o '"tx":{"bytes":[0-9]*' | grep -o '[0-9]*$'; }
for name in off off-again lossless "$overlap" "$short" "$short-again"; do
  mode "${name%-again}"
  before=$(wire)
  ip netns exec "$head" "$venv/bin/python" "$here/equal.py" "${plain[@]}" "$out/$name.json" "${prompts[@]}"
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
for name in lossless "$overlap" "$short-again"; do
  most=0.55
  [ "$name" != "$short-again" ] || most=0.30
  share=$(awk -v off="$(cat "$out/off-again.bytes")" -v on="$(cat "$out/$name.bytes")" 'BEGIN {printf "%.3f", on / off}')
  echo "$name: $share of the bytes that the head sends without the plugin"
  [ "$hidden" -lt 4096 ] || awk -v share="$share" -v most=$most 'BEGIN {exit share > most}' || { echo "FAILED: more than $most"; failed=1; }
done
# Counters grow: of fp8 what its own run added. A value has two bytes, or four, twice; then one, and 16 for each token.
grown() { echo $(($(value "$1" "$short") - $(value "$1" "$overlap"))); }
bytes=2
[ "$dtype" != float32 ] || bytes=4
awk -v sent="$(grown bytes_sent)" -v saved="$(grown bytes_saved)" -v hidden="$hidden" -v bytes=$bytes \
  'BEGIN {exit sent * 2 * bytes * hidden != (sent + saved) * (hidden + 16)}' || { echo "FAILED: fp8 is not one byte"; failed=1; }
[ "$(value handoffs "$overlap")" != "$(value handoffs lossless)" ] || { echo "FAILED: no overlap"; failed=1; }
decides='' compared=''
same() { python3 "$here/same.py" "$out/$1.json" "$out/$2.json" $decides; }
same off off-again || { echo "(vLLM alone differs from run to run: only prompts that were alone decide)"; decides=one; }
if same off off-again > "$out/again"; then
  same lossless "$overlap" || { echo "FAILED: the modes differ"; failed=1; }
else
  echo "(and these too: the modes cannot be compared)"
  compared=" (modes not compared)"
  # Shown to whoever reads it; it decides nothing.
  same lossless "$overlap" || true
fi
same "$short" "$short-again" || [ -n "$decides" ] || { echo "FAILED: fp8 differs from run to run"; failed=1; }
same off "$short" || echo "(fp8 is not the model's own text)"
if [ "$dtype" = float32 ]; then
  same off lossless || { echo "FAILED: float32 is not exact"; failed=1; }
else
  same off lossless || echo "(one norm a stage boundary rounds otherwise: docs/handoff.md)"
fi

if [ -n "${TEXT:-}" ]; then
  for name in off off-again lossless "$overlap" "$short"; do
    mode "${name%-again}"
    ip netns exec "$head" "$venv/bin/python" "$here/quality.py" ask "$out/$name.quality" "$TEXT"
  done
  python3 "$here/quality.py" compare "$out"/{off,off-again,lossless,"$overlap","$short"}.quality
fi

load() { # TAG USERSxPROMPTxANSWERxREQUESTS
  local words
  IFS=x read -ra words <<< "$2"
  ip netns exec "$head" "$venv/bin/python" "$here/load.py" "$1" "${words[@]}" "$RANDOM" "$vocabulary"
}
for rate in "$@"; do
  burst=256kb
  [[ ! $rate =~ ^[1-9][0-9]+gbit$ ]] || burst=1mb
  for space in "${ranks[@]}"; do
    # The first time there is none.
    ip netns exec "$space" tc qdisc del dev v0 root 2> "$out/tc.log" || true
    [ "$rate" = none ] || ip netns exec "$space" tc qdisc add dev v0 root tbf rate "$rate" burst $burst latency 50ms
  done
  for run in "${runs[@]}"; do
    chosen=${run#*@}
    mode "${chosen//,/ }"
    load "$rate,$chosen" "${run%@*}"
  done
done

if [ -n "${KILL:-}" ]; then
  mode "$overlap"
  load "killed" "$usual" > "$out/killed.log" 2>&1 &
  client=$!
  sleep 10
  end "${ranks[-1]}"
  for second in $(seq 1 "$KILL"); do
    sleep 1
    printf 'killed %d s ago: health %s, %d processes of the head\n' "$second" "$(health)" "$(ip netns pids "$head" | wc -l)"
  done
  for space in "${ranks[@]}"; do end "$space"; done
  wait "$client" || tail -n 1 "$out/killed.log"
  wait 2> "$out/ended.log"
  [ "$device" != cuda ] || nvidia-smi --query-gpu=index,memory.used --format=csv,noheader
  start
  ip netns exec "$head" "$venv/bin/python" "$here/equal.py" "${plain[@]}" "$out/after.json" "${prompts[@]}"
  same "$overlap" after || { echo "FAILED: other texts after a kill"; failed=1; }
fi
[ $failed = 0 ] && echo "PROVED: $("$venv/bin/python" -c 'import vllm; print(vllm.__version__)') on $device, $stages stages x $tensor$compared"
exit $failed
