#!/usr/bin/env bash
# The bench over real TCP on a slow network, on one machine: hosts are network namespaces, joined by a switch through links
# that a token bucket shapes in both directions.
#
#     jobs/bench/net.sh [--hosts 4] [--ranks 4] [--rate 1gbit] [--burst 128kb] [--queue 50ms] [--mtu BYTES] [--mpiexec PATH] [--python PATH] [...]
#     jobs/bench/net.sh --device cuda [--hosts 2] [--ranks 2] [--rate 10gbit] [--transport tcp|ucx] [--gpus 0,1] [...]
#     jobs/bench/net.sh --delay 10ms [...]                                        each packet arrives so much later
#     jobs/bench/net.sh [...] --module jobs.train CONFIG.toml [ARGUMENT ...]     another module in place of jobs.bench
#     jobs/bench/net.sh [...] --launcher torchrun --module MODULE [ARGUMENT ...] by torchrun on each host, without MPI
#
# --rate none leaves the links as they are. --burst is what a link lets through unshaped after a pause: by default 128kb up to
# 10gbit, else 256kb. --queue is how long a packet waits at most in the queue of a link, which drops what does not fit. --mtu is the
# longest packet, 1500 bytes unless said; many clusters have jumbo frames of 9000. With --device cuda the GPUs (--gpus, or all that
# nvidia-smi lists) are dealt out to the hosts in equal shares, and a host sees its own alone.
# Messages between GPUs are staged through host memory over Open MPI's tcp, or sent from device memory over UCX's tcp (--transport
# ucx); NCCL takes the same links. Ranks beyond the GPUs of a host share them.
#
# With --delay a relay in user space (docs/results/relay.py) is the switch, so that no netem is needed; links are shaped on the way
# out alone. Its copies take a core.
#
# Needs root, or a kernel that lets users make namespaces. Everything is made inside mount, network and process namespaces of its
# own, of which nothing is visible outside: when the first process in them ends, by whatever means, the kernel takes links, hosts
# and processes down. So there is nothing to clean up after a kill, and two runs cannot collide.
set -uo pipefail

say() { echo "bench-net: $*" >&2; }
refuse() { say "$@"; exit 2; }

device=cpu hosts='' ranks='' rate='' burst='' queue=50ms mtu='' delay='' transport='' gpus='' mpiexec='' launcher=mpiexec inside='' module=jobs.bench
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$here/.venv/bin/python
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    --inside) inside=yes; shift ;;
    --device | --hosts | --ranks | --rate | --burst | --queue | --mtu | --delay | --transport | --gpus | --mpiexec | --launcher | --python | --module)
        [ $# -ge 2 ] || refuse "$1 needs a value"
        printf -v "${1#--}" %s "$2"
        shift 2
        ;;
    *) break ;;
    esac
done
if [ "$device" = cuda ]; then
    hosts=${hosts:-2} rate=${rate:-10gbit}
    [ "$launcher" != mpiexec ] || transport=${transport:-tcp}
else
    hosts=${hosts:-4} rate=${rate:-1gbit}
fi
ranks=${ranks:-$hosts}
# a bucket of 128 KB runs empty between two turns of the kernel above 10 Gb/s
if [ -z "$burst" ]; then
    burst=128kb
    [[ ! $rate =~ ^([0-9]+)[0-9.]*gbit$ || ${BASH_REMATCH[1]} -le 10 ]] || burst=256kb
fi
# the ranks run in the checkout, but paths are meant from here
arguments=() before=''
for word in "$@"; do
    [[ $module != jobs.bench || $word != --device* ]] || refuse "--device goes before the arguments of the bench: it makes the hosts"
    [[ $before != --json || $word == /* ]] || word=$PWD/$word
    arguments+=("$word")
    before=$word
done

check_gpus() {
    # as the caller may see them: by CUDA's numbers
    gpus=${gpus:-${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd,)}}
    [ -n "$gpus" ] || refuse "--device cuda needs GPUs, and nvidia-smi lists none: name them by --gpus 0,1"
    local list
    IFS=, read -ra list <<<"$gpus"
    [ ${#list[@]} -ge "$hosts" ] || refuse "GPU(s) $gpus are fewer than $hosts hosts, each of which has its own: try --hosts ${#list[@]}"
    [ $((ranks % hosts)) = 0 ] || refuse "$ranks ranks are not the same number on each of $hosts hosts"
}

user=() # what unshare needs besides where this is not root
check() {
    [[ $hosts =~ ^[1-9][0-9]?$ ]] || refuse "--hosts $hosts is not a number in [1, 99]"
    [[ $ranks =~ ^[1-9][0-9]*$ ]] || refuse "--ranks $ranks is not a number of at least 1"
    [ "$ranks" -ge "$hosts" ] || refuse "$ranks ranks are fewer than $hosts hosts: try --hosts $ranks"
    [[ $device == cpu || $device == cuda ]] || refuse "--device $device is neither cpu nor cuda"
    [[ $rate == none || $rate =~ ^[0-9]+(\.[0-9]+)?[kmg]bit$ ]] || refuse "--rate $rate is not a rate such as 1gbit or 100mbit, nor none"
    [[ $burst =~ ^[0-9]+(\.[0-9]+)?[km]?b$ ]] || refuse "--burst $burst is not a number of bytes such as 128kb"
    [[ $queue =~ ^[0-9]+(\.[0-9]+)?ms$ ]] || refuse "--queue $queue is not a time such as 50ms"
    [[ -z $mtu || $mtu =~ ^[1-9][0-9]{2,4}$ ]] || refuse "--mtu $mtu is not a number of bytes in [100, 99999]"
    [[ -z $delay || $delay =~ ^[0-9]+(\.[0-9]+)?(us|ms)$ ]] || refuse "--delay $delay is not a time such as 10ms"
    [[ -z $delay || -c /dev/net/tun ]] || refuse "--delay needs /dev/net/tun (CONFIG_TUN), which is not there"
    [[ $launcher == mpiexec || $launcher == torchrun ]] || refuse "--launcher $launcher is neither mpiexec nor torchrun"
    [[ $launcher == mpiexec || $module != jobs.bench ]] || refuse "--launcher torchrun needs --module: jobs.bench runs over MPI"
    [[ $launcher == mpiexec || -z $transport$mpiexec ]] || refuse "--transport and --mpiexec are for --launcher mpiexec"
    [[ $launcher == mpiexec || $((ranks % hosts)) == 0 ]] || refuse "$ranks ranks are not the same number on each of $hosts hosts"
    [[ $device == cuda || -z $transport$gpus ]] || refuse "--transport and --gpus are for --device cuda"
    [[ $device == cpu || $launcher == torchrun || $transport == tcp || $transport == ucx ]] || refuse "--transport $transport is neither tcp nor ucx"
    [[ $gpus =~ ^([0-9]+(,[0-9]+)*)?$ ]] || refuse "--gpus $gpus is not a list of numbers such as 0,1"
    [ "$device" = cpu ] || check_gpus
    [ "$(uname -s)" = Linux ] || refuse "network namespaces are Linux's; this is $(uname -s)"
    local missing=''
    command -v ip >/dev/null && command -v tc >/dev/null || missing+=' iproute2 (ip, tc)'
    command -v unshare >/dev/null && command -v setpriv >/dev/null || missing+=' util-linux (unshare, setpriv)'
    command -v mount >/dev/null || missing+=' mount'
    [ -z "$missing" ] || refuse "not installed:$missing. On Debian and Ubuntu: apt-get install iproute2 util-linux mount"
    [ -x "$python" ] || refuse "$python is no interpreter: \`make setup\` makes .venv, and --python names another one"
    local why
    [ "$(id -u)" = 0 ] || user=(--user --map-root-user)
    why=$(unshare "${user[@]}" --mount --net --pid --fork --mount-proc true 2>&1) && return
    [ "$(id -u)" = 0 ] || refuse "needs root, or a system that lets users make namespaces; for user $(id -un): $why"
    refuse "this system does not let root make namespaces (a container without CAP_SYS_ADMIN?): $why"
}

outside() {
    check
    local child=''
    # mpiexec and the ranks are in no process group of ours: killing the first process of their namespace ends them all
    trap '[ -z "$child" ] || kill -KILL "$child" 2>/dev/null' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    setpriv --pdeathsig KILL -- unshare "${user[@]}" --mount --net --uts --pid --fork --kill-child=KILL --mount-proc \
        "$BASH" "${BASH_SOURCE[0]}" --inside --device "$device" --hosts "$hosts" --ranks "$ranks" --rate "$rate" --burst "$burst" \
        --queue "$queue" --mtu "$mtu" --delay "$delay" --transport "$transport" --gpus "$gpus" --mpiexec "$mpiexec" --launcher "$launcher" --python "$(realpath -s "$python")" \
        --module "$module" "${arguments[@]}" &
    child=$!
    wait "$child"
    local status=$?
    child=''
    exit $status
}

# make WHAT KERNEL-OPTION COMMAND...
make() {
    local what=$1 option=$2 why
    shift 2
    why=$("$@" 2>&1) || refuse "this kernel gives no $what ($option): \`$*\` says: $why"
}

network() {
    mount -t tmpfs tmpfs /run && mkdir -p /run/netns /run/tmp || refuse "cannot mount a private /run"
    ip link set lo up
    if [ -n "$delay" ]; then
        (cd "$here" && exec "$python" -m docs.results.relay --delay "$delay" --hosts "$hosts") >/run/relay &
        until grep -qs ready /run/relay; do kill -0 $! 2>/dev/null && sleep 0.1 || refuse "the relay has ended"; done
        ip link set t254 name switch
    else
        make 'bridge' CONFIG_BRIDGE ip link add switch type bridge
    fi
    ip addr add 10.77.0.254/24 dev switch && ip link set switch up || refuse "cannot bring the switch up"
    echo 127.0.0.1 localhost >/run/hosts
    local i list=()
    IFS=, read -ra list <<<"$gpus"
    local share=$((${#list[@]} / hosts))
    for ((i = 1; i <= hosts; i++)); do
        # GPUs of host i; nothing on a host that has none
        (IFS=, && echo "${list[*]:(i - 1) * share:share}") >"/run/gpus.h$i"
        make 'network namespaces' CONFIG_NET_NS ip netns add "h$i"
        if [ -n "$delay" ]; then
            ip link set "t$i" netns "h$i" && ip -n "h$i" link set "t$i" name eth0 || refuse "cannot join host $i to the relay"
        else
            make 'veth pairs' CONFIG_VETH ip link add "v$i" type veth peer name eth0 netns "h$i"
            ip link set "v$i" master switch up || refuse "cannot join host $i to the switch"
        fi
        ip -n "h$i" addr add "10.77.0.$i/24" dev eth0 &&
            ip -n "h$i" link set lo up && ip -n "h$i" link set eth0 up || refuse "cannot join host $i to the switch"
        if [ -n "$mtu" ]; then
            { [ -n "$delay" ] || ip link set "v$i" mtu "$mtu"; } && ip -n "h$i" link set eth0 mtu "$mtu" || refuse "links take no packets of $mtu bytes"
        fi
        # BBR, where it is this machine's, paces below the rate of a link as short as these, and a pause between steps is no sign of a
        # network that has changed
        ip netns exec "h$i" sh -c 'cd /proc/sys/net/ipv4 && echo reno >tcp_congestion_control && echo 0 >tcp_slow_start_after_idle' ||
            refuse "cannot set TCP's congestion control in host $i"
        if [ "$rate" != none ]; then
            local bucket=(root tbf rate "$rate" burst "$burst" latency "$queue")
            make 'token bucket' CONFIG_NET_SCH_TBF tc -n "h$i" qdisc add dev eth0 "${bucket[@]}"
            [ -n "$delay" ] || make 'token bucket' CONFIG_NET_SCH_TBF tc qdisc add dev "v$i" "${bucket[@]}"
        fi
        echo "10.77.0.$i h$i" >>/run/hosts
    done
    mount --bind /run/hosts /etc/hosts || refuse "cannot give the hosts names"
    # what mpiexec calls instead of ssh
    cat >/run/agent <<'AGENT'
#!/usr/bin/env bash
while [[ $1 == -* ]]; do shift; done
host=h${1##*[.h]}
shift
gpus=$(<"/run/gpus.$host")
[ -z "$gpus" ] || export CUDA_VISIBLE_DEVICES=$gpus
exec ip netns exec "$host" unshare --uts bash -c "hostname $host; $*"
AGENT
    chmod +x /run/agent
}

# by_torchrun ARGUMENT...: the largest status of the hosts. Where one fails the others end with this script: they would wait for it.
by_torchrun() {
    local i words
    printf -v words '%q ' "$python" -m torch.distributed.run --nnodes "$hosts" --nproc-per-node $((ranks / hosts)) \
        --master-addr 10.77.0.1 --master-port 29500
    say "$hosts hosts at $rate, $ranks ranks, torchrun"
    : >/run/ended
    for ((i = 1; i <= hosts; i++)); do
        { /run/agent "10.77.0.$i" "$words --node-rank $((i - 1)) -m $(printf '%q ' "$module" "$@")" </dev/null; echo $? >>/run/ended; } &
    done
    until [ "$(wc -l </run/ended)" = "$hosts" ] || grep -qvx 0 /run/ended; do sleep 0.2; done
    return "$(sort -n /run/ended | tail -n 1)"
}

bench() {
    cd "$here" || exit 1
    # what the MPI of this machine is told would reach the ranks; which algorithm a collective takes is to be measured
    local name
    for name in $(compgen -e); do
        [[ $name == OMPI_MCA_coll_tuned_* || $name != OMPI_MCA_* && $name != PRTE_MCA_* && $name != PMIX_MCA_* ]] || unset "$name"
    done
    export TMPDIR=/run/tmp OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export NCCL_SOCKET_IFNAME=eth0 NCCL_IB_DISABLE=1 GLOO_SOCKET_IFNAME=eth0
    [ "$launcher" = mpiexec ] || { by_torchrun "$@"; return; }
    [ -n "$mpiexec" ] || mpiexec=$("$python" -c 'from oktopk.launch import find_mpiexec; print(find_mpiexec())') || exit 2
    local flavour
    flavour=$("$python" -c 'import sys; from oktopk.launch import mpiexec_flavour; print(mpiexec_flavour(sys.argv[1]))' "$mpiexec") || exit 2
    local names=() methods=(dense oktopk topka topkdsa gtopk gaussiank union mpi) i
    # consecutive ranks share a host, as launchers place them; the first hosts hold one more where they do not divide
    for ((i = 1; i <= hosts; i++)); do names+=("10.77.0.$i:$((ranks / hosts + (i <= ranks % hosts)))"); done
    local list
    list=$(IFS=,; echo "${names[*]}")
    local launch=("$mpiexec") network="TCP over $rate links"
    [ "$rate" != none ] || network='TCP over unshaped links'
    [ -z "$delay" ] || network+=", packets held $delay"
    [ -z "$mtu" ] || network+=", packets of $mtu bytes"
    case $flavour in
    openmpi)
        launch+=(--prtemca plm_ssh_agent /run/agent --prtemca prte_if_include 10.77.0.0/24)
        launch+=(--host "$list" --map-by slot --bind-to none)
        # han would hide which algorithm runs between the hosts
        launch+=(--mca coll ^han)
        [ "$device" = cuda ] || launch+=(--mca mpi_yield_when_idle 1)
        if [ "$transport" = ucx ]; then
            # no shared memory and no CUDA IPC: UCX would take them between hosts as well
            export UCX_TLS=tcp,self,cuda_copy UCX_NET_DEVICES=eth0
            launch+=(--mca pml ucx --mca opal_common_ucx_tls any --mca opal_common_ucx_devices any)
            launch+=(-x UCX_TLS -x UCX_NET_DEVICES)
            network+=', device memory over UCX'
        else
            local transports=self,tcp
            [ "$ranks" -le "$hosts" ] || transports=self,sm,tcp  # shared memory inside a host
            launch+=(--mca pml ob1 --mca btl "$transports" --mca btl_tcp_if_include 10.77.0.0/24)
        fi
        ;;
    mpich)
        [ "$device" = cpu ] || refuse "--device cuda needs Open MPI, and $mpiexec is MPICH's"
        export UCX_TLS=tcp,self UCX_NET_DEVICES=eth0
        launch+=(-launcher ssh -launcher-exec /run/agent -iface switch -hosts "$list")
        ;;
    *) refuse "$mpiexec is neither Open MPI 5's nor MPICH's" ;;
    esac
    if [ "$device" = cuda ] && [ "$transport" = tcp ]; then
        export OKTOPK_CUDA_AWARE_MPI=0
        launch+=(-x OKTOPK_CUDA_AWARE_MPI)
        network+=', staged through host memory'
    fi
    say "$hosts hosts at $rate, $ranks ranks, $flavour"
    if [ "$module" != jobs.bench ]; then
        "${launch[@]}" -n "$ranks" "$python" -m mpi4py -m "$module" "$@" </dev/null
        return
    fi
    local defaults=(--device "$device")
    # dense steps take a second each at these rates: a few of them say as much as sixty
    if [ "$device" = cuda ]; then
        local wires=(plain float32 bfloat16 int8 int4)
        methods=(nccl nccl-bf16 "${wires[@]/#/oktopk-flat-}")
        [ "$ranks" -le "$hosts" ] || methods+=("${wires[@]/#/oktopk-hosts-}")
        defaults+=(--steps 64 --warmup 64 --dense-steps 4 --length 14728266,133547324,306535400)
    else
        defaults+=(--dense-steps 10)
    fi
    defaults+=(--methods "${methods[@]}")
    "${launch[@]}" -n "$ranks" "$python" -m mpi4py -m jobs.bench "${defaults[@]}" \
        --network "$hosts hosts, $network" "$@" </dev/null
}

if [ -n "$inside" ]; then
    network
    bench "$@"
else
    outside
fi
