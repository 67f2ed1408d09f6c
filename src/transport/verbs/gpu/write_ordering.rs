//! Whether a GPU needs a flush before it reads what an RDMA device wrote to its memory.
//!
//! Owns that decision. Pure: must not know how a flush is made.

/// The order in which a GPU sees the writes of other devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::transport::verbs) struct WriteOrdering {
    /// The scope in which writes are ordered (`CUGPUDirectRDMAWritesOrdering`), if the driver reports it.
    pub ordering: Option<i32>,
    /// The major number of the compute capability.
    pub compute_major: i32,
    /// Whether the GPU uses the processor's page tables, as it does if a coherent link connects the two.
    pub coherent: bool,
}

/// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER`: the GPU that owns the memory sees the writes in order, without
/// a flush.
pub(super) const OWNER: i32 = 100;

/// Whether a GPU must not read what an RDMA device has written to it before a flush, nor may another rail
/// send it on.
pub(in crate::transport::verbs) fn needs_flush(gpu: WriteOrdering, rails: usize) -> bool {
    if rails > 1 {
        // The GPU orders its own reads only. What one device reads may pass what another has written.
        return true;
    }
    if gpu.coherent {
        // The completion takes the coherent link and the data takes the PCI bus, which the driver's answer
        // ignores.
        return true;
    }
    match gpu.ordering {
        Some(ordering) => ordering < OWNER,
        // What a newer driver would report: since Hopper, the GPU keeps the order.
        None => gpu.compute_major < 9,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_is_needed_unless_the_gpu_keeps_the_order() {
        let gpu = WriteOrdering { ordering: Some(0), compute_major: 8, coherent: false };
        let cases = [
            (gpu, true),
            (WriteOrdering { ordering: Some(OWNER), ..gpu }, false),
            (WriteOrdering { ordering: Some(200), ..gpu }, false),
            // The driver does not report the ordering.
            (WriteOrdering { ordering: None, ..gpu }, true),
            (WriteOrdering { ordering: None, compute_major: 9, ..gpu }, false),
            // The driver reports an order, but there is more than one path.
            (WriteOrdering { ordering: Some(200), compute_major: 9, coherent: true }, true),
        ];
        for (gpu, needed) in cases {
            assert_eq!(needs_flush(gpu, 1), needed, "{gpu:?}");
            assert!(needs_flush(gpu, 2), "another rail may send on what this one brought");
        }
    }
}
