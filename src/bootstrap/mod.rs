//! Bootstrap: who am I, where are the others, are they still alive.
