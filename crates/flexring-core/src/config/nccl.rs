//! NCCL's settings of RDMA and sockets, for clusters that set those only.
//!
//! Owns which they are, and NCCL's files. flexring's own variables win.

use std::path::PathBuf;

/// flexring's name, NCCL's name, and whether the value must be a number.
const NAMES: [(&str, &str, bool); 7] = [
    ("FLEXRING_IB_HCA", "NCCL_IB_HCA", false),
    ("FLEXRING_IB_GID_INDEX", "NCCL_IB_GID_INDEX", true),
    ("FLEXRING_IB_TC", "NCCL_IB_TC", true),
    ("FLEXRING_IB_SL", "NCCL_IB_SL", true),
    ("FLEXRING_IB_TIMEOUT", "NCCL_IB_TIMEOUT", true),
    ("FLEXRING_IB_RETRIES", "NCCL_IB_RETRY_CNT", true),
    ("FLEXRING_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", false),
];

/// Whether NCCL has a setting for this one of flexring's.
pub(super) fn has(name: &str) -> bool {
    NAMES.iter().any(|(own, ..)| *own == name)
}

/// NCCL's variables, and the lines of its files.
pub(super) struct NcclSettings {
    /// Where each text is from, the one that wins first.
    files: Vec<(PathBuf, String)>,
}

impl NcclSettings {
    /// The files that NCCL reads: `NCCL_CONF_FILE` or `~/.nccl.conf`, then `/etc/nccl.conf`.
    pub(super) fn read() -> Self {
        let path = |name: &str| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
        let own = path("NCCL_CONF_FILE").or_else(|| path("HOME").map(|home| home.join(".nccl.conf")));
        let files = own.into_iter().chain([PathBuf::from("/etc/nccl.conf")]);
        let text = |path: PathBuf| {
            let is_file = std::fs::metadata(&path).is_ok_and(|file| file.is_file());
            let text = is_file.then(|| std::fs::read(&path).ok()).flatten()?;
            Some((path, String::from_utf8_lossy(&text).into_owned()))
        };
        Self { files: files.filter_map(text).collect() }
    }

    /// The value for one of flexring's settings and where it is from, if NCCL has a usable one.
    pub(super) fn value(
        &self,
        name: &str,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Option<(String, String)> {
        let (_, theirs, is_number) = NAMES.iter().find(|(own, ..)| *own == name)?;
        // NCCL writes -1 for its default.
        let is_usable = |value: &String| {
            !value.is_empty() && (!is_number || value.bytes().all(|digit| digit.is_ascii_digit()))
        };
        let in_file = |(path, text): &(PathBuf, String)| {
            let value = text
                .lines()
                .find_map(|line| line.trim().strip_prefix(theirs)?.trim_start().strip_prefix('='))?;
            Some((value.trim().to_owned(), format!("{theirs} in {}", path.display())))
        };
        let given = environment(theirs).map(|value| (value.trim().to_owned(), (*theirs).to_owned()));
        given.or_else(|| self.files.iter().find_map(in_file)).filter(|(value, _)| is_usable(value))
    }

    /// flexring's settings that have a value of NCCL's, as in `FLEXRING_IB_TC=106 (NCCL_IB_TC)`.
    pub(super) fn used(&self, environment: impl Fn(&str) -> Option<String>) -> Vec<String> {
        let used = |(own, ..): &(&str, &str, bool)| {
            let is_free = environment(own).is_none_or(|text| text.is_empty());
            let (value, from) = is_free.then(|| self.value(own, &environment)).flatten()?;
            Some(format!("{own}={value} ({from})"))
        };
        NAMES.iter().filter_map(used).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_win_over_files_and_defaults_of_nccl_count_as_unset() {
        let file = "# the fabric\nNCCL_IB_TC = 106\nNCCL_IB_HCA=mlx5_0,mlx5_1\n#NCCL_IB_SL=3\nNCCL_IB_GID_INDEX=-1\n";
        let settings = NcclSettings { files: vec![(PathBuf::from("/etc/nccl.conf"), file.to_owned())] };
        let environment = |name: &str| match name {
            "NCCL_IB_HCA" => Some("^mlx5_2".to_owned()),
            "FLEXRING_IB_TIMEOUT" => Some("18".to_owned()),
            "NCCL_IB_TIMEOUT" => Some("22".to_owned()),
            _ => None,
        };
        let of = |name| settings.value(name, environment).map(|(value, _)| value);
        assert_eq!(of("FLEXRING_IB_HCA").as_deref(), Some("^mlx5_2"));
        assert_eq!(of("FLEXRING_IB_TC").as_deref(), Some("106"));
        assert_eq!(
            [of("FLEXRING_IB_SL"), of("FLEXRING_IB_GID_INDEX"), of("FLEXRING_ALGO")],
            [None, None, None]
        );
        let used =
            ["FLEXRING_IB_HCA=^mlx5_2 (NCCL_IB_HCA)", "FLEXRING_IB_TC=106 (NCCL_IB_TC in /etc/nccl.conf)"];
        assert_eq!(settings.used(environment), used);
    }
}
