//! `FLEXRING_IB_HCA`: which devices and ports may be used.
//!
//! Owns the syntax, which is that of `NCCL_IB_HCA`.

use crate::config::Config;
use crate::error::{Error, Result};

/// A parsed `FLEXRING_IB_HCA`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HcaFilter {
    exclude: bool,
    exact: bool,
    /// (name or prefix of a name, the port if only one is meant)
    entries: Vec<(String, Option<u8>)>,
}

impl HcaFilter {
    /// The filter that the settings ask for, if they do.
    ///
    /// # Errors
    /// As for `parse`, naming where the text was read.
    pub fn of(config: &Config) -> Result<Option<Self>> {
        let parse = |text| Self::parse(&config.source("FLEXRING_IB_HCA"), text);
        config.ib_hca.as_deref().map(parse).transpose()
    }

    /// Parses the setting of this name: names joined by commas, after an optional `^` (exclude) and `=`
    /// (exact names).
    ///
    /// # Errors
    /// `InvalidSetting` if a port is not a number from 1, or if there is no name.
    fn parse(name: &str, text: &str) -> Result<Self> {
        let (exclude, rest) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
        let (exact, rest) = rest.strip_prefix('=').map_or((false, rest), |rest| (true, rest));
        let entry = |entry: &str| match entry.split_once(':') {
            None => Some((entry.to_owned(), None)),
            Some((name, port)) => {
                port.parse().ok().filter(|port| *port > 0).map(|port| (name.to_owned(), Some(port)))
            }
        };
        let texts = rest.split(',').map(str::trim).filter(|entry| !entry.is_empty());
        let entries: Option<Vec<_>> = texts.map(entry).collect();
        match entries.filter(|entries| !entries.is_empty()) {
            Some(entries) => Ok(Self { exclude, exact, entries }),
            None => Err(Error::invalid_setting(format!(
                "{name}=\"{text}\" cannot be used: expected names joined by commas, each with an \
                     optional port, such as mlx5_0,mlx5_1:1, =mlx5_0 or ^mlx5_2"
            ))),
        }
    }

    /// Whether this port of this device may be used.
    pub fn admits(&self, device: &str, port: u8) -> bool {
        let matches = self.entries.iter().any(|(name, only)| {
            let named = if self.exact { device == name } else { device.starts_with(name.as_str()) };
            named && only.is_none_or(|only| only == port)
        });
        matches != self.exclude
    }

    /// Whether the setting names this port, in contrast to not excluding it.
    pub fn names(&self, device: &str, port: u8) -> bool {
        !self.exclude && self.admits(device, port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn the_syntax_is_that_of_nccl() {
        let all = [("mlx5_0", 1), ("mlx5_1", 1), ("mlx5_1", 2), ("mlx5_10", 1), ("rxe0", 1)];
        for (text, expected) in [
            ("mlx5", vec!["mlx5_0:1", "mlx5_1:1", "mlx5_1:2", "mlx5_10:1"]),
            ("mlx5_1", vec!["mlx5_1:1", "mlx5_1:2", "mlx5_10:1"]),
            ("=mlx5_1", vec!["mlx5_1:1", "mlx5_1:2"]),
            ("=mlx5_1:2", vec!["mlx5_1:2"]),
            ("mlx5_1:1", vec!["mlx5_1:1", "mlx5_10:1"]),
            ("=mlx5_1:2, rxe0", vec!["mlx5_1:2", "rxe0:1"]),
            ("^mlx5_1", vec!["mlx5_0:1", "rxe0:1"]),
            ("^=mlx5_1", vec!["mlx5_0:1", "mlx5_10:1", "rxe0:1"]),
            ("^=mlx5_1:2", vec!["mlx5_0:1", "mlx5_1:1", "mlx5_10:1", "rxe0:1"]),
            ("^mlx5,rxe", vec![]),
            ("mthca", vec![]),
        ] {
            let filter = HcaFilter::parse("FLEXRING_IB_HCA", text).expect(text);
            let admitted = all.iter().filter(|(device, port)| filter.admits(device, *port));
            let admitted: Vec<String> = admitted.map(|(device, port)| format!("{device}:{port}")).collect();
            assert_eq!(admitted, expected, "{text}");
        }
    }

    #[test]
    fn an_error_quotes_the_invalid_setting() {
        for text in ["^", "=", "mlx5_0:", "mlx5_0:0", "mlx5_0:x", "mlx5_0:1:2", " , ", "^="] {
            let error = HcaFilter::parse("FLEXRING_IB_HCA", text).expect_err(text);
            assert_eq!(error.kind(), ErrorKind::InvalidSetting);
            assert!(
                error.message().starts_with(&format!("FLEXRING_IB_HCA=\"{text}\" cannot be used")),
                "{error}"
            );
        }
    }

    #[test]
    fn a_port_that_is_not_excluded_is_not_named() {
        let names = |text: &str| HcaFilter::parse("FLEXRING_IB_HCA", text).expect(text).names("mlx5_0", 1);
        assert!(names("mlx5") && !names("^rxe") && !names("rxe"));
    }
}
