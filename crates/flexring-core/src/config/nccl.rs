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

/// A value of NCCL's.
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclValue {
    pub(super) text: String,
    /// The variable.
    pub(super) name: &'static str,
    /// The file that has it, if it is not in the environment.
    file: Option<PathBuf>,
}

impl NcclValue {
    /// Where it was read, as in `NCCL_IB_TC in /etc/nccl.conf`.
    pub(super) fn source(&self) -> String {
        let file = self.file.as_ref().map(|file| format!(" in {}", file.display()));
        self.name.to_owned() + &file.unwrap_or_default()
    }
}

/// NCCL's variables, and the lines of its files.
pub(super) struct NcclSettings {
    /// Where each text is from, the one that wins first.
    files: Vec<(PathBuf, String)>,
}

impl NcclSettings {
    /// The files that NCCL reads: `NCCL_CONF_FILE` or `~/.nccl.conf`, then `/etc/nccl.conf`.
    pub(super) fn read(environment: impl Fn(&str) -> Option<String>) -> Self {
        let path = |name: &str| environment(name).filter(|path| !path.is_empty()).map(PathBuf::from);
        let own = path("NCCL_CONF_FILE").or_else(|| path("HOME").map(|home| home.join(".nccl.conf")));
        let files = own.into_iter().chain([PathBuf::from("/etc/nccl.conf")]);
        let text = |path: PathBuf| {
            let is_file = std::fs::metadata(&path).is_ok_and(|file| file.is_file());
            let text = is_file.then(|| std::fs::read(&path).ok()).flatten()?;
            Some((path, String::from_utf8_lossy(&text).into_owned()))
        };
        Self { files: files.filter_map(text).collect() }
    }

    /// The value for one of flexring's settings, if NCCL has one that is not its default. It may be unusable.
    pub(super) fn value(
        &self,
        name: &str,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Option<NcclValue> {
        let (_, theirs, is_number) = NAMES.iter().find(|(own, ..)| *own == name)?;
        let in_file = |(path, text): &(PathBuf, String)| {
            let value = text
                .lines()
                .find_map(|line| line.trim().strip_prefix(theirs)?.trim_start().strip_prefix('='))?;
            Some((value.to_owned(), Some(path.clone())))
        };
        let given = environment(theirs).map(|value| (value, None));
        let (text, file) = given.or_else(|| self.files.iter().find_map(in_file))?;
        let text = text.trim();
        // NCCL writes -1 for its default, and takes hexadecimal numbers.
        if text.is_empty() || (*is_number && text.starts_with('-')) {
            return None;
        }
        let hexadecimal = text.strip_prefix("0x").filter(|_| *is_number);
        let number = hexadecimal.and_then(|digits| u32::from_str_radix(digits, 16).ok());
        let text = number.map_or_else(|| text.to_owned(), |number| number.to_string());
        Some(NcclValue { text, name: theirs, file })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_win_over_files_and_defaults_of_nccl_count_as_unset() {
        let file = "# the fabric\nNCCL_IB_TC = 0x6a\nNCCL_IB_HCA=mlx5_0,mlx5_1\n#NCCL_IB_SL=3\nNCCL_IB_GID_INDEX=-1\n\
                    NCCL_IB_RETRY_CNT=5\nNCCL_SOCKET_IFNAME=^docker\n";
        let settings = NcclSettings { files: vec![(PathBuf::from("/etc/nccl.conf"), file.to_owned())] };
        let environment = |name: &str| match name {
            "NCCL_IB_HCA" => Some("^mlx5_2".to_owned()),
            "NCCL_IB_TIMEOUT" => Some("high".to_owned()),
            _ => None,
        };
        let of = |name| settings.value(name, environment).map(|value| (value.source(), value.text));
        let expected = |from: &str, text: &str| Some((from.to_owned(), text.to_owned()));
        assert_eq!(of("FLEXRING_IB_HCA"), expected("NCCL_IB_HCA", "^mlx5_2"));
        assert_eq!(of("FLEXRING_IB_TC"), expected("NCCL_IB_TC in /etc/nccl.conf", "106"));
        assert_eq!(of("FLEXRING_IB_RETRIES"), expected("NCCL_IB_RETRY_CNT in /etc/nccl.conf", "5"));
        let interfaces = expected("NCCL_SOCKET_IFNAME in /etc/nccl.conf", "^docker");
        assert_eq!(of("FLEXRING_SOCKET_IFNAME"), interfaces);
        assert_eq!(of("FLEXRING_IB_TIMEOUT"), expected("NCCL_IB_TIMEOUT", "high"), "an error names it");
        assert_eq!(
            [of("FLEXRING_IB_SL"), of("FLEXRING_IB_GID_INDEX"), of("FLEXRING_ALGO")],
            [None, None, None]
        );
    }
}
