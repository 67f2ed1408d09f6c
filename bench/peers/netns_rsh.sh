#!/bin/sh
# Replaces ssh in Open MPI and MPICH where nodes are network namespaces: netns_rsh.sh [-x] NODE COMMAND...
# They distinguish nodes by host name, so the command gets a host name of its own.
[ "$1" = -x ] && shift
node=$1
shift
exec ip netns exec "$node" unshare --uts sh -c "hostname $node && $*"
