#!/bin/sh
# What Open MPI starts its daemons with instead of ssh when nodes are network namespaces: ompi_rsh.sh NODE COMMAND...
# A host name of its own is what tells Open MPI one node from another.
node=$1
shift
exec ip netns exec "$node" unshare --uts sh -c "hostname $node && $*"
