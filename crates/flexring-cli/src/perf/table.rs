//! The table of `flexring perf`, in the layout of nccl-tests.
//!
//! Owns columns, units and rounding. The columns must not change: scripts that read the output of nccl-tests
//! parse them.

use super::report::{ModelRow, PerfRow, Timing};
use flexring::AdaptationStatistics;
use flexring_plan::topology::bandwidth_label as label;

/// The three lines above the first row.
pub const HEAD: &str = "\
#                                                              out-of-place                       in-place          
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)       ";

/// The line of one row, without a line break.
pub fn row(row: &PerfRow) -> String {
    format!(
        "{:12}  {:12}  {:>8}  {:>6}  {:>6}{}{}",
        row.size,
        row.count,
        row.dtype,
        row.redop,
        row.root,
        columns(&row.out_of_place),
        columns(&row.in_place)
    )
}

/// What no schedule can do better in a row: microseconds by the bandwidths of the topology, and the times
/// of the row as multiples of them.
pub fn least(microseconds: f64, [one, other]: [f64; 2]) -> String {
    format!(
        "any schedule takes at least {} us by the links' bandwidths: {one:.3} and {other:.3} times that",
        time(microseconds).trim()
    )
}

/// The three lines above the first training step.
pub const MODEL_HEAD: &str = "\
#                                                             buckets                          fused                     
#       size  gradients  buckets      type   redop     time   algbw   busbw #wrong     time   algbw   busbw #wrong  ratio
#        (B)                                           (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)              ";

/// The lines of one training step, without a line break at the end.
pub fn model_row(row: &ModelRow) -> String {
    let mib = |bytes: &usize| format!("{:.1}", *bytes as f64 / f64::from(1 << 20));
    let buckets: Vec<String> = row.buckets.iter().map(mib).collect();
    format!(
        "# buckets of {} MiB\n{:12}  {:9}  {:7}  {:>8}  {:>6}{}{}  {:5.3}",
        buckets.join(" "),
        row.size,
        row.gradients,
        row.buckets.len(),
        row.dtype,
        row.redop,
        columns(&row.bucketed),
        columns(&row.fused),
        row.ratio
    )
}

fn columns(timing: &Timing) -> String {
    let wrong = timing.wrong.map_or_else(|| "N/A".to_owned(), |wrong| wrong.to_string());
    format!("  {}  {:6.2}  {:6.2}  {wrong:>5}", time(timing.mean_us), timing.algbw, timing.busbw)
}

/// Microseconds in seven columns, with fewer decimals for longer times.
fn time(us: f64) -> String {
    match us {
        10_000.0.. => format!("{us:7.0}"),
        100.0.. => format!("{us:7.1}"),
        _ => format!("{us:7.2}"),
    }
}

/// The lines below the last row: `wrong` elements in all and the average bus bandwidth in GB/s.
pub fn foot(wrong: u64, avg_busbw: f64) -> String {
    format!("{}\n# Avg bus bandwidth    : {avg_busbw:.4} \n#", model_foot(wrong))
}

/// The lines about links, and about measured and predicted times.
pub fn adaptation(statistics: &AdaptationStatistics) -> String {
    let links = statistics.nodes.iter().map(|node| match (node.first, node.current) {
        (Some(first), Some(current)) if first == current => format!("{} {}", node.name, label(current)),
        (Some(first), Some(current)) => {
            format!("{} {} (at first {})", node.name, label(current), label(first))
        }
        _ => format!("{} not measured", node.name),
    });
    let mut lines = format!("# Links in bit/s        : {}", links.collect::<Vec<_>>().join(", "));
    lines += &match statistics.replans {
        0 => format!("\n# Plan                 : {}", statistics.algorithm),
        _ => format!(
            "\n# Plan                 : {} from call {} on, plan {}",
            statistics.algorithm,
            statistics.replanned_at,
            statistics.replans + 1
        ),
    };
    for times in &statistics.calls {
        let measured = times.measured.as_secs_f64() * 1e6;
        let predicted = times.predicted.map_or_else(
            || "no prediction".to_owned(),
            |predicted| {
                let predicted = predicted.as_secs_f64() * 1e6;
                format!("predicted {} us, {:+.1} %", time(predicted), (measured / predicted - 1.0) * 100.0)
            },
        );
        lines += &format!("\n# {:12} B       : last call {} us, {predicted}", times.bytes, time(measured));
    }
    lines + "\n#"
}

/// The line below the last training step: `wrong` elements in all.
pub fn model_foot(wrong: u64) -> String {
    let result = if wrong == 0 { "OK" } else { "FAILED" };
    format!("# Out of bounds values : {wrong} {result}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_as_in_nccl_tests() {
        let timing =
            |mean_us, wrong| Timing { mean_us, algbw: 53.171, busbw: 93.05, wrong, ..Timing::default() };
        let example = PerfRow {
            size: 33_554_432,
            count: 8_388_608,
            dtype: "float",
            redop: "sum",
            root: -1,
            least_us: None,
            out_of_place: timing(631.12, Some(0)),
            in_place: timing(23.456, None),
        };
        assert_eq!(
            row(&example),
            "    33554432       8388608     float     sum      -1    631.1   53.17   93.05      0    23.46   53.17   93.05    N/A"
        );
        let widths: Vec<usize> = HEAD.lines().map(str::len).collect();
        assert_eq!(widths, [116; 3]);
        assert_eq!(row(&example).len(), 116);
    }

    #[test]
    fn columns_of_training_steps_are_aligned() {
        let timing =
            |mean_us, wrong| Timing { mean_us, algbw: 3.171, busbw: 3.05, wrong, ..Timing::default() };
        let example = ModelRow {
            model: "resnet50".to_owned(),
            size: 102_228_128,
            dtype: "bfloat16",
            redop: "sum",
            gradients: 161,
            buckets: vec![8_196_000, 31_502_336],
            least_us: None,
            bucketed: timing(631.12, Some(0)),
            fused: timing(23_456.0, None),
            ratio: 1.0416,
        };
        let lines = model_row(&example);
        let (buckets, row) = lines.split_once('\n').expect("two lines");
        assert_eq!(buckets, "# buckets of 7.8 30.0 MiB");
        assert_eq!(
            row,
            "   102228128        161        2  bfloat16     sum    631.1    3.17    3.05      0    23456    3.17    3.05    N/A  1.042"
        );
        let widths: Vec<usize> = MODEL_HEAD.lines().map(str::len).collect();
        assert_eq!((widths, row.len()), (vec![121; 3], 121));
    }

    #[test]
    fn the_foot_says_whether_all_elements_were_right() {
        assert_eq!(foot(0, 1.5), "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 1.5000 \n#");
        assert!(foot(3, 1.5).contains(": 3 FAILED\n"));
    }
}
