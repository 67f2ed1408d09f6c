//! Tests of parsing, bounds, error messages and the table of settings.

use super::*;

use crate::error::ErrorKind;

fn read(pairs: &[(&str, &str)]) -> Result<Config> {
    Config::read(|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, text)| (*text).to_owned()))
}

#[test]
fn unset_settings_have_their_defaults() {
    assert_eq!(read(&[]).expect("defaults are valid"), Config::default());
}

#[test]
fn values_are_parsed() {
    let config = read(&[
        ("FLEXRING_RANK", "3"),
        ("FLEXRING_ALGO", "RING"),
        ("FLEXRING_SUBCHUNK", "1M"),
        ("FLEXRING_TIMEOUT_MS", "1500"),
        ("FLEXRING_SOCKET_IFNAME", "^lo"),
    ])
    .expect("all valid");
    assert_eq!(config.rank, Some(3));
    assert_eq!(config.algo, Algorithm::Ring);
    assert_eq!(config.subchunk, Size(1 << 20));
    assert_eq!(config.timeout, Duration::from_millis(1500));
    assert_eq!(config.socket_ifname.as_deref(), Some("^lo"));
}

#[test]
fn settings_that_were_given_are_known_and_must_agree_where_a_profile_may_change_them() {
    let shared = |pairs: &[(&str, &str)]| read(pairs).expect("valid").shared();
    let (unset, given) =
        ([("FLEXRING_TUNING", "f")], [("FLEXRING_TUNING", "f"), ("FLEXRING_SUBCHUNK", "128K")]);
    assert_eq!(read(&given).expect("valid").given, BTreeSet::from(["FLEXRING_SUBCHUNK", "FLEXRING_TUNING"]));
    assert_ne!(shared(&unset), shared(&given));
    assert_eq!(shared(&unset), shared(&[("FLEXRING_TUNING", "f"), ("FLEXRING_TRANSPORT", "auto")]));
    assert_eq!(shared(&unset[1..]), shared(&given[1..]));
}

#[test]
fn an_empty_variable_counts_as_unset() {
    let every: Vec<(&str, &str)> = Config::NAMES.iter().map(|name| (*name, "")).collect();
    assert_eq!(read(&every).expect("all are unset"), Config::default());
    for row in Config::default().table(|_| Some(String::new())) {
        assert_eq!(row.origin, Origin::Default, "{}", row.name);
    }
}

#[test]
fn errors_quote_the_variable_and_its_text() {
    for (name, text) in [
        ("FLEXRING_RANK", "-1"),
        ("FLEXRING_ALGO", "rign"),
        ("FLEXRING_SUBCHUNK", "1000"),
        ("FLEXRING_SUBCHUNK", "99999999999999999999G"),
        ("FLEXRING_TIMEOUT_MS", "0"),
        ("FLEXRING_MASTER_PORT", "70000"),
        ("FLEXRING_SLOTS", "1"),
        ("FLEXRING_SMALL", "65537"),
        ("FLEXRING_MASTER_ADDR", "  "),
        ("FLEXRING_LOG", "loud"),
        ("FLEXRING_LOG", "tcp=loud"),
        ("FLEXRING_IB_GID_INDEX", "256"),
        ("FLEXRING_IB_PKEY", "0xffff"),
        ("FLEXRING_IB_SL", "16"),
        ("FLEXRING_IB_TC", "256"),
        ("FLEXRING_IB_TIMEOUT", "0"),
        ("FLEXRING_IB_ADAPTIVE_ROUTING", "2"),
        ("FLEXRING_IB_ADAPTIVE_ROUTING", "on"),
        ("FLEXRING_IB_EAGER", "-1"),
        ("FLEXRING_IB_EAGER", "8 KB"),
        ("FLEXRING_IB_RAILS", "9"),
        ("FLEXRING_GPU_DIRECT", "yes"),
    ] {
        let error = read(&[(name, text)]).expect_err(text);
        assert_eq!(error.kind(), ErrorKind::InvalidSetting);
        assert!(error.message().starts_with(&format!("{name}=\"{text}\"")), "{error}");
        assert!(error.message().contains("expected"), "{error}");
    }
}

#[test]
fn sizes_are_binary_and_print_as_they_parse() {
    for (text, bytes) in [("0", 0), ("4096", 4096), ("512K", 512 << 10), ("3M", 3 << 20), ("2g", 2 << 30)] {
        assert_eq!(Size::parse(text), Some(Size(bytes)));
        assert_eq!(Size::parse(&Size(bytes).to_string()), Some(Size(bytes)));
    }
    for text in ["", "K", "1.5M", "-1", "1T", "é"] {
        assert_eq!(Size::parse(text), None, "{text}");
    }
}

#[test]
fn every_setting_has_the_prefix_and_a_description() {
    for row in Config::default().table(|_| None) {
        assert!(row.name.starts_with("FLEXRING_"));
        assert!(row.description.ends_with('.'));
        let words = row.description.split_whitespace().count();
        assert!(words <= 40, "{}: {words} words: leave details to the page that it links to", row.name);
        assert_eq!(row.origin, Origin::Default);
    }
}

#[test]
fn unknown_variables_are_named_with_the_setting_that_was_meant_if_it_is_close() {
    for (name, closest) in [
        ("FLEXRING_RNAK", Some("FLEXRING_RANK")),
        ("FLEXRING_SUBCHUNKS", Some("FLEXRING_SUBCHUNK")),
        ("FLEXRING_TIMEOUT", Some("FLEXRING_TIMEOUT_MS")),
        ("FLEXRING_ALOG", Some("FLEXRING_ALGO")),
        ("FLEXRING_FOO", None),
        ("FLEXRING_BUILD_HAS_COMPILER", None),
        ("FLEXRING_", None),
    ] {
        let unknown = Config::unknown_variables([name.to_owned(), "PATH".to_owned()].into_iter());
        assert_eq!(unknown, [(name.to_owned(), closest)]);
    }
    let known = ["FLEXRING_ALGO", "FLEXRING_UNIQUE_ID", "FLEXRING_BLESS"].map(str::to_owned);
    assert_eq!(Config::unknown_variables(known.into_iter()), []);
}

#[test]
fn a_range_of_ports_is_parsed_and_walked_through_from_any_of_its_ports() {
    let read = |text: &str| {
        let lookup = |name: &str| (name == "FLEXRING_PORT_RANGE").then(|| text.to_owned());
        Config::read(lookup).map(|config| config.port_range)
    };
    let ports = read(" 20000 - 20002").expect("a range").expect("it is set");
    assert_eq!(ports.to_string(), "20000-20002");
    for number in [0, 1, 2, 3, 65535] {
        let mut all: Vec<u16> = ports.starting_at(number).collect();
        all.sort_unstable();
        assert_eq!(all, [20000, 20001, 20002]);
    }
    let all = read("1-65535").expect("a range").expect("it is set");
    assert_eq!(all.starting_at(65535).count(), 65535);
    for text in ["20000", "20002-20000", "0-5", "1-65536", "a-b", "1-2-3"] {
        let error = read(text).expect_err(text);
        assert!(error.message().contains(&format!("FLEXRING_PORT_RANGE=\"{text}\"")), "{error}");
        assert!(error.message().contains("such as 20000-20999"), "{error}");
    }
}

#[test]
fn accepted_values_are_described() {
    let table = Config::default().table(|_| None);
    let expected = |name: &str| {
        let row = table.iter().find(|row| row.name == name).expect("a setting");
        row.expected.to_string()
    };
    for (name, phrase) in [
        ("FLEXRING_SLOTS", "a whole number from 2 to 65536"),
        ("FLEXRING_IB_GID_INDEX", "a whole number from 0 to 255"),
        ("FLEXRING_SMALL", "a number of bytes up to 64K, such as 4K"),
        ("FLEXRING_SPIN_US", "a whole number"),
        ("FLEXRING_LOWERING", "auto, chain or direct"),
        ("FLEXRING_IB_ADAPTIVE_ROUTING", "auto, 0 or 1"),
    ] {
        assert_eq!(expected(name), phrase);
    }
}

#[test]
fn ranges_include_their_bounds() {
    for (name, first, last) in [
        ("FLEXRING_IB_SL", "0", "15"),
        ("FLEXRING_IB_GID_INDEX", "0", "255"),
        ("FLEXRING_IB_RAILS", "1", "8"),
    ] {
        assert!(read(&[(name, first)]).is_ok() && read(&[(name, last)]).is_ok(), "{name}");
    }
}

#[test]
fn the_documentation_lists_the_settings_that_must_be_equal() {
    let document = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/settings.md"))
        .expect("docs/settings.md can be read");
    let (_, list) = document
        .split_once("of the schedule and the protocol are equal: ")
        .expect("the list has a beginning");
    let (list, _) = list.split_once(". ").expect("the list has an end");
    let documented: Vec<&str> = list.split('`').skip(1).step_by(2).collect();
    let shared = read(&[]).expect("valid").shared();
    assert_eq!(documented, shared.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>());
}
