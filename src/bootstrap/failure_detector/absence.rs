//! How messages describe ranks that are not in a call, or silent.
//!
//! Owns the wording.

use super::member::{Member, RankStatus};
use crate::bootstrap::call_state::{CallState, call_name};
use crate::bootstrap::heartbeat::seconds;
use crate::call::Call;
use crate::rank::{Rank, RankList};
use std::collections::BTreeMap;
use std::time::Duration;

/// Describes which ranks are not in `call`, and which state they are in instead.
pub(super) fn describe_absent(members: &[Member], call: &Call) -> String {
    // Ranks in equal states share one clause.
    let mut absent: Vec<(&Member, Vec<Rank>)> = Vec::new();
    for (rank, member) in members.iter().enumerate() {
        // Ranks that exchange messages with some others are in no collective, whatever its number.
        let is_in =
            |other: &Call| other.sequence == call.sequence && other.is_collective() == call.is_collective();
        if member.status == RankStatus::Active && member.state.call().is_some_and(is_in) {
            continue;
        }
        match absent
            .iter_mut()
            .find(|(other, _)| other.status == member.status && other.state == member.state)
        {
            Some((_, ranks)) => ranks.push(rank),
            None => absent.push((member, vec![rank])),
        }
    }
    if absent.is_empty() {
        return format!("every rank is in {}", call_name(call));
    }
    let sentences: Vec<String> =
        absent.iter().map(|(member, ranks)| describe_absence(member, call, ranks)).collect();
    sentences.join("; ")
}

/// Says that these active ranks have been silent for a time, and on which nodes they are.
pub(super) fn describe_silence(members: &[Member], ranks: &[Rank], silent: Duration) -> String {
    let silent = seconds(silent);
    if let [rank] = ranks {
        let Member { process, state, .. } = &members[*rank];
        return format!(
            "rank {rank} ({process}) has been silent for {silent}: stopped, swapped out, or its machine is gone; its last message \
             came {state}"
        );
    }
    let mut by_host: BTreeMap<&str, Vec<Rank>> = BTreeMap::new();
    for rank in ranks {
        by_host.entry(&members[*rank].process.host).or_default().push(*rank);
    }
    let is_active_on =
        |member: &Member, host: &str| member.status == RankStatus::Active && *member.process.host == *host;
    let is_whole = |(host, silent): (&&str, &Vec<Rank>)| {
        members.iter().filter(|member| is_active_on(member, host)).count() == silent.len()
    };
    let causes = if by_host.iter().all(is_whole) {
        "the machine is gone, stopped, or cut off from the network"
    } else {
        "stopped, swapped out, or cut off from the network"
    };
    let hosts: Vec<String> =
        by_host.iter().map(|(host, ranks)| format!("{} on host {host}", RankList::new(ranks))).collect();
    format!("{} have been silent for {silent}, since the same moment: {causes}", hosts.join(" and "))
}

/// Describes the state of `ranks`, which are not in `call`. All of them are in the state of `member`.
pub(super) fn describe_absence(member: &Member, call: &Call, ranks: &[Rank]) -> String {
    let who = RankList::new(ranks);
    let (has, it, is) = if ranks.len() == 1 { ("has", "it", "is") } else { ("have", "they", "are") };
    let call_name = call_name(call);
    if member.status == RankStatus::Left {
        return match member.state {
            CallState::Idle { finished } if finished > 0 => {
                format!("{who} {has} left after call #{finished}")
            }
            _ => format!("{who} {has} left {}", member.state),
        };
    }
    match member.state {
        CallState::Idle { finished: 0 } if !call.is_collective() => format!("{who} {is} in no call"),
        CallState::Idle { finished } if !call.is_collective() => {
            format!("{who} {is} in no call: {it} finished #{finished}")
        }
        CallState::Idle { finished: 0 } => {
            format!("{who} {has} not called {call_name}: {it} {has} made no call yet")
        }
        CallState::Idle { finished } if finished < call.sequence => {
            format!("{who} {has} not called {call_name}: {it} finished #{finished}")
        }
        CallState::Idle { .. } => format!("{who} {has} finished {call_name}"),
        CallState::InCall(other) => format!("{who} {is} in {other}"),
    }
}
