//! Which launcher counts, if the variables of several are set.
//!
//! Owns the rules by which one launcher may start another.
//!
//! - A launcher whose variables cannot be used, because one is missing for example, is skipped if those of
//!   another can: batch scripts export `WORLD_SIZE` for other programs.
//! - torchrun may run within mpirun or srun, and mpirun within srun, which starts mpirun's daemons. The inner
//!   one counts.
//! - So does a program that starts more ranks than an outer launcher started processes, and sets torchrun's
//!   variables for them.
//! - A launcher that started a single process says nothing about the ranks which that process starts.
//! - Otherwise all must give the same rank and world size. Variables that are left over in a shell do not.

use super::variables::{Environment, LauncherInfo, NumericVariable, mpich, open_mpi, slurm, torchrun};
use crate::error::{Error, Result};

/// The launchers whose variables are complete, the innermost first.
///
/// # Errors
/// `InvalidSetting`, about the first one whose variables cannot be used, if there is no other.
pub(super) fn complete_launchers(environment: &Environment<'_>) -> Result<Vec<LauncherInfo>> {
    let mut complete = Vec::new();
    let mut unusable = None;
    for launcher in [torchrun, open_mpi, mpich, slurm] {
        match launcher(environment) {
            Ok(info) => complete.extend(info),
            Err(error) => unusable = unusable.or(Some(error)),
        }
    }
    match unusable {
        Some(error) if complete.is_empty() => Err(error),
        _ => Ok(complete),
    }
}

/// The launcher that started this process, if it is a known one.
///
/// # Errors
/// `InvalidSetting`, with the variables, if launchers give different ranks or world sizes and one did not
/// start the other.
pub(super) fn detect_launcher(environment: &Environment<'_>) -> Result<Option<LauncherInfo>> {
    let Some((inner, outer)) = nested_launchers(environment)? else {
        return Ok(None);
    };
    match outer.iter().find(|outer| contradicts(environment, &inner, outer)) {
        Some(outer) => Err(contradiction(&inner, outer)),
        None => Ok(Some(inner)),
    }
}

/// The innermost launcher, and those that may have started it.
fn nested_launchers(environment: &Environment<'_>) -> Result<Option<(LauncherInfo, Vec<LauncherInfo>)>> {
    let mut launchers = complete_launchers(environment)?.into_iter();
    let Some(inner) = launchers.next() else {
        return Ok(None);
    };
    let mut outer: Vec<LauncherInfo> = launchers.collect();
    if outer.iter().chain([&inner]).any(|launcher| launcher.is_mpi) {
        // srun starts the daemons of mpirun, or one program that is not a rank.
        outer.retain(|launcher| launcher.is_mpi);
    }
    Ok(Some((inner, outer)))
}

/// Whether a process cannot be a rank of both.
fn contradicts(environment: &Environment<'_>, inner: &LauncherInfo, outer: &LauncherInfo) -> bool {
    let (rank, world) = (inner.rank.value, inner.world.value);
    let is_equal = rank == outer.rank.value && world == outer.world.value;
    !(is_equal || outer.world.value == 1 || is_within(environment, inner, outer))
}

/// Whether a process of `outer` may have started this rank and others: an agent of torchrun, or a program
/// that sets the same variables.
fn is_within(environment: &Environment<'_>, inner: &LauncherInfo, outer: &LauncherInfo) -> bool {
    inner.launcher == "torchrun"
        && (inner.world.value > outer.world.value || is_of_torchrun_itself(environment))
}

/// Only torchrun itself sets this variable. Its agents may number the nodes in another order than an outer
/// launcher.
fn is_of_torchrun_itself(environment: &Environment<'_>) -> bool {
    environment.text("TORCHELASTIC_RUN_ID").is_some()
}

fn contradiction(inner: &LauncherInfo, outer: &LauncherInfo) -> Error {
    let variables = |launcher: &LauncherInfo| format!("{} {}", launcher.rank, launcher.world);
    let names = |launcher: &LauncherInfo| format!("{} {}", launcher.rank.name, launcher.world.name);
    Error::invalid_setting(format!(
        "{}, as {} sets them, contradict {} of {}: unset those that are left over from another job (unset {}, or unset {}), or set \
         FLEXRING_RANK and FLEXRING_WORLD_SIZE",
        variables(inner),
        inner.launcher,
        variables(outer),
        outer.launcher,
        names(inner),
        names(outer),
    ))
}

/// A warning, if a program that sets torchrun's variables has started more ranks than an outer launcher
/// started processes, but not as one program for each process would, with equally many ranks and those of the
/// first process first.
pub(super) fn unusual_ranks(environment: &Environment<'_>) -> Option<String> {
    let (inner, outer) = nested_launchers(environment).ok()??;
    let is_usual = |outer: &&LauncherInfo| {
        let per_process = inner.world.value.checked_div(outer.world.value).unwrap_or(0);
        per_process * outer.world.value == inner.world.value
            && inner.rank.value.checked_div(per_process) == Some(outer.rank.value)
    };
    let is_expected = |outer: &&LauncherInfo| is_within(environment, &inner, outer);
    let outer = outer.iter().filter(is_expected).find(|outer| !is_usual(outer))?;
    (!is_of_torchrun_itself(environment)).then(|| {
        format!(
            "{} {} are used, but {} {} of {} do not suggest them: unset {} {} if they are left over from another job",
            inner.rank,
            inner.world,
            outer.rank,
            outer.world,
            outer.launcher,
            inner.rank.name,
            inner.world.name
        )
    })
}

/// A warning, if this process is the only rank of its world, but a launcher that started several processes
/// started it as its first one.
pub(super) fn alone_among_several(environment: &Environment<'_>, world: NumericVariable) -> Option<String> {
    let several = complete_launchers(environment).unwrap_or_default();
    let several = several.iter().find(|outer| outer.world.value > 1 && outer.rank.value == 0)?;
    (world.value == 1).then(|| {
        format!(
            "{} started {} processes ({}), but {world} makes each of them the only rank of a world of its own: unset {} if they \
             are to be one world",
            several.launcher, several.world.value, several.world, world.name
        )
    })
}

#[cfg(test)]
mod tests;
