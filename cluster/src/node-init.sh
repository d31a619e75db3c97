# First process of a node: it makes the node's own view of the machine, then reaps what the node leaves behind.
# $1: the node's folder. Everything here lives in the node's mount and network namespaces and goes with them.
set -e
mount --make-rshared /
# Sockets and state with fixed places: containerd's shims, network namespaces, IPAM, device plugins, log links, the lock of iptables.
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=755 tmpfs /var/lib
mount -t tmpfs -o mode=755 tmpfs /var/log
mkdir -p /run/containerd /run/netns /run/lock /var/lib/cni /var/lib/kubelet /var/log/containers
# The kubelet wants these values and would set them for the whole machine. Here it reads what it wants, and the machine stays as it is.
shadow() {
    [ -e "$2" ] || return 0
    mkdir -p "$1/sysctl"
    echo "$3" >"$1/sysctl/${2##*/}"
    mount --bind "$1/sysctl/${2##*/}" "$2"
}
shadow "$1" /proc/sys/vm/overcommit_memory 1
shadow "$1" /proc/sys/vm/panic_on_oom 0
shadow "$1" /proc/sys/kernel/panic 10
shadow "$1" /proc/sys/kernel/panic_on_oops 1
shadow "$1" /proc/sys/kernel/keys/root_maxkeys 1000000
shadow "$1" /proc/sys/kernel/keys/root_maxbytes 25000000
echo 1 >/proc/sys/net/ipv4/ip_forward
: >"$1/up"
sleep infinity &
while :; do wait; done
