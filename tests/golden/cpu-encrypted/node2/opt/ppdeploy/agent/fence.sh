#!/bin/sh
# Written by ppdeploy; changes are overwritten by the next apply.
# Ends the rank when the agent has been gone for 60 s: nobody else would, and it would hold its GPUs for ever.
# Ages are by the time since boot, which no clock change moves. Nothing but the shell is started while all is well.
set -eu

unit='ppdeploy-rank@tiny.service'
heartbeat='/run/ppdeploy-agent/heartbeat'

# Sets `age` to the seconds since the agent's last heartbeat.
look() {
    read -r uptime _ </proc/uptime
    beat=0
    if [ -r "$heartbeat" ]; then
        # The file has no newline at its end: `read` returns 1 then, but has the value.
        read -r beat <"$heartbeat" || true
    fi
    case $beat in
    '' | *[!0-9]*) beat=0 ;;
    esac
    age=$((${uptime%%.*} - beat))
}

look
if [ "$age" -le 60 ]; then
    exit 0
fi
if ! systemctl is-active --quiet "$unit"; then
    exit 0
fi
# A machine that was suspended wakes with an old heartbeat, and this may run before the agent's next one.
sleep 5
look
if [ "$age" -gt 60 ]; then
    echo "the agent has not been heard for $age s: ending $unit"
    systemctl kill --signal=SIGKILL "$unit"
fi
