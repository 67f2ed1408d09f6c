//! Messages between two ranks: their latency, and their times by length.
//!
//! Owns how long messages are, and the rate that follows from their times.

use super::session::median;
use flexring::{Buffer, Communicator, Result};
use flexring_core::rank::Rank;
use std::time::{Duration, Instant};

/// Elements of the shortest messages for bandwidth: 64 KiB.
pub const SHORTEST: usize = 16 << 10;
/// Round trips before those that are measured.
const WARM_UP: usize = 5;
/// Round trips that are measured.
const ROUND_TRIPS: usize = 31;

/// About how long the messages take by which bursts are measured, and the pause before each.
const BURST_MESSAGE: Duration = Duration::from_millis(8);
const BURST_PAUSE: Duration = Duration::from_millis(10);
/// Longest message by which bursts are measured: on slower links fifteen of them would take too much of the
/// time of `tune`.
const LONGEST_BURST_MESSAGE: Duration = Duration::from_millis(50);
/// Messages after a pause. The median counts: a delay of the one before looks like a burst, and one of the
/// message itself hides it.
const BURST_TRIALS: usize = 5;
/// Differences up to this part of the time count as noise. Chosen, not measured.
const NOISE: f64 = 0.05;

/// Seconds of a short message in one direction: half the median of round trips.
pub fn latency(comm: &Communicator, peer: Rank, leads: bool) -> Result<f64> {
    let mut message = [0u8; 8];
    let mut times = Vec::new();
    for trip in 0..WARM_UP + ROUND_TRIPS {
        let begun = Instant::now();
        if leads {
            comm.send(&message, peer)?;
            comm.recv(&mut message, peer)?;
        } else {
            comm.recv(&mut message, peer)?;
            comm.send(&message, peer)?;
        }
        if trip >= WARM_UP {
            times.push(begun.elapsed().as_secs_f64() / 2.0);
        }
    }
    Ok(median(times))
}

/// Sends a message from the rank that leads, and one byte back. Returns the seconds that both took on this
/// rank.
fn message_with_reply(comm: &Communicator, peer: Rank, leads: bool, message: &mut [f32]) -> Result<f64> {
    let mut reply = [0u8];
    let begun = Instant::now();
    if leads {
        comm.send(message, peer)?;
        comm.recv(&mut reply, peer)?;
    } else {
        comm.recv(message, peer)?;
        comm.send(&reply, peer)?;
    }
    Ok(begun.elapsed().as_secs_f64())
}

/// A message's bytes and the seconds that it took.
pub type MessageTime = (f64, f64);

/// The times of ever longer messages from the rank that leads to the other, each the shorter of two. The
/// messages become longer until one takes `time`. Empty on the other rank.
pub fn message_times(
    comm: &Communicator,
    peer: Rank,
    leads: bool,
    latency: f64,
    time: Duration,
    buffer: &mut Buffer<f32>,
) -> Result<Vec<MessageTime>> {
    let mut times = Vec::new();
    let mut len = [SHORTEST as u64];
    if !leads {
        loop {
            comm.recv(&mut len, peer)?;
            if len[0] == 0 {
                return Ok(times);
            }
            message_with_reply(comm, peer, leads, &mut buffer[..len[0] as usize])?;
        }
    }
    loop {
        let elements = len[0] as usize;
        let mut shortest = f64::INFINITY;
        for _ in 0..2 {
            comm.send(&len, peer)?;
            shortest = shortest.min(message_with_reply(comm, peer, leads, &mut buffer[..elements])?);
        }
        times.push(((elements * size_of::<f32>()) as f64, time_of_message(shortest, latency)));
        if shortest >= time.as_secs_f64() || elements == buffer.len() {
            comm.send(&[0u64], peer)?;
            return Ok(times);
        }
        len[0] = (4 * elements).min(buffer.len()) as u64;
    }
}

/// The time of a message whose reply takes `latency`. The message takes half of the time at least; a latency
/// that is longer than the other half was measured while other programs ran.
fn time_of_message(with_reply: f64, latency: f64) -> f64 {
    with_reply - latency.min(with_reply / 2.0)
}

/// The bytes that a link of this `rate` lets pass at once after a pause of 10 ms, as far as messages of 8 ms
/// show them; 0 if the difference may be noise, if the shortest messages take too long, and on the other
/// rank. The rate counts on the rank that leads.
pub fn burst(
    comm: &Communicator,
    peer: Rank,
    leads: bool,
    rate: f64,
    buffer: &mut Buffer<f32>,
) -> Result<f64> {
    let longest = buffer.len();
    let wanted = (rate * BURST_MESSAGE.as_secs_f64()) as usize / size_of::<f32>();
    let elements = wanted.clamp(SHORTEST.min(longest), longest);
    let is_slow = (elements * size_of::<f32>()) as f64 > rate * LONGEST_BURST_MESSAGE.as_secs_f64();
    let mut len = [if is_slow { 0 } else { elements as u64 }];
    if leads {
        comm.send(&len, peer)?
    } else {
        comm.recv(&mut len, peer)?
    }
    if len[0] == 0 {
        return Ok(0.0);
    }
    let mut exchange = || message_with_reply(comm, peer, leads, &mut buffer[..len[0] as usize]);
    let mut bursts = Vec::new();
    for _ in 0..BURST_TRIALS {
        // Uses up what the link lets pass at once.
        exchange()?;
        let in_a_row = exchange()?;
        if leads {
            std::thread::sleep(BURST_PAUSE);
        }
        bursts.push(burst_of(in_a_row, exchange()?, rate));
    }
    Ok(if leads { median(bursts) } else { 0.0 })
}

/// The bytes that pass at once if a message takes these seconds without and with a pause before it.
fn burst_of(in_a_row: f64, after_a_pause: f64, rate: f64) -> f64 {
    let saved = in_a_row - after_a_pause;
    if saved > NOISE * in_a_row { saved * rate } else { 0.0 }
}

/// Bytes per second of the fastest message; 0 of none.
pub fn best_rate(times: &[MessageTime]) -> f64 {
    times.iter().map(|(bytes, seconds)| bytes / seconds).fold(0.0, f64::max)
}

/// Bytes per second at which the longest message exceeds the one before; 0 of none. A link that was idle may
/// let some bytes pass at once, such as one whose rate a token bucket limits, so rates of short messages are
/// those of the machines.
pub fn steady_rate(times: &[MessageTime]) -> f64 {
    let [.., (short, before), (long, after)] = times else { return best_rate(times) };
    // A short message that was delayed makes the difference small.
    if after > before { ((long - short) / (after - before)).min(best_rate(times)) } else { long / after }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_between_nodes_is_that_beyond_what_idle_links_let_pass_at_once() {
        // 100 B/s after the first 256 bytes.
        let time = |bytes: f64| (bytes, 0.1 + (bytes - 256.0).max(0.0) / 100.0);
        let times = [64.0, 256.0, 1024.0, 4096.0].map(time);
        assert_eq!(best_rate(&times), 2560.0);
        assert!((steady_rate(&times) - 100.0).abs() < 1e-9);
        assert_eq!((steady_rate(&times[..1]), steady_rate(&[])), (640.0, 0.0));
        assert_eq!(steady_rate(&[(64.0, 2.0), (256.0, 2.0)]), 128.0);
    }

    #[test]
    fn a_latency_that_was_disturbed_makes_no_message_infinitely_fast() {
        assert_eq!(time_of_message(50e-6, 10e-6), 40e-6);
        assert_eq!([40e-6, 60e-6].map(|latency| time_of_message(50e-6, latency)), [25e-6; 2]);
    }

    #[test]
    fn what_passes_at_once_is_what_a_pause_saves_if_it_is_more_than_noise() {
        assert!((burst_of(8e-3, 6e-3, 1e8) - 2e5).abs() < 1.0);
        assert_eq!([burst_of(8e-3, 7.7e-3, 1e8), burst_of(8e-3, 9e-3, 1e8)], [0.0; 2]);
    }
}
