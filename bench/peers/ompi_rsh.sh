#!/bin/sh
# Replaces ssh in Open MPI where nodes are network namespaces: ompi_rsh.sh NODE COMMAND...
# Open MPI distinguishes nodes by host name, so the command gets a host name of its own.
node=$1
shift
exec ip netns exec "$node" unshare --uts sh -c "hostname $node && $*"
