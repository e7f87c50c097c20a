#!/usr/bin/env bash
# A real Slurm on this machine, as root and without systemd: munged, slurmctld and four slurmd, each a node of two cores.
#
#     lab.sh up DIR PORT      starts it in the empty folder DIR (absolute); PORT and the four after it must be free
#     lab.sh down DIR         stops it
#
# Then export SLURM_CONF=DIR/slurm.conf.
set -euo pipefail
action=$1 dir=$2
if [ "$action" = down ]; then
  for file in "$dir"/run/slurmd-n?.pid "$dir"/run/slurmctld.pid "$dir"/run/munged.pid; do
    [ -s "$file" ] || continue
    pid=$(cat "$file")
    kill "$pid" 2>/dev/null || continue
    # slurmctld writes its state before it goes; a zombie that nobody reaps is gone as well
    for _ in $(seq 50); do
      grep -qs '^State:[[:space:]]*[^ZX]' "/proc/$pid/status" || continue 2
      sleep 0.2
    done
    kill -9 "$pid" 2>/dev/null || true
  done
  exit 0
fi
port=$3 host=$(hostname -s)
export SLURM_CONF=$dir/slurm.conf
mkdir -p "$dir"/{run,log,state,munge,spool-n{1,2,3,4},tmp-n{1,2,3,4}}
chmod 755 "$dir" "$dir/run"
chmod 700 "$dir/munge"
dd if=/dev/urandom of="$dir/munge/munge.key" bs=1 count=1024 status=none
chmod 400 "$dir/munge/munge.key"
munged --force --key-file "$dir/munge/munge.key" --socket "$dir/run/munge.socket" --pid-file "$dir/run/munged.pid" \
  --log-file "$dir/log/munged.log" --seed-file "$dir/munge/seed"
# cred_expire: a job that was queued again may start once its old credential has expired, by default after two minutes.
# TmpFS: of its own for each node, or the pmix plugins of several nodes on one machine would meet in one folder.
cat >"$SLURM_CONF" <<C
ClusterName=lab
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmctldPort=$port
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
TmpFS=$dir/tmp-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,sched_min_interval=100000
ReturnToService=2
KillWait=5
NodeName=n[1-4] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + 4))] CPUs=2 CoresPerSocket=2 RealMemory=1000 State=UNKNOWN
PartitionName=lab Nodes=n[1-4] Default=YES MaxTime=INFINITE State=UP
C
printf 'CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n' >"$dir/cgroup.conf"
slurmctld -f "$SLURM_CONF"
for node in n1 n2 n3 n4; do slurmd -f "$SLURM_CONF" -N $node; done
for _ in $(seq 100); do
  [ "$(sinfo -h -o %T)" = idle ] && exit 0
  sleep 0.2
done
echo "the nodes of the lab do not come up:" >&2
sinfo >&2
tail -n 20 "$dir"/log/*.log >&2
exit 1
