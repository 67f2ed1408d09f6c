//! Communicators of one process share devices, protection domains and registrations.

use super::*;
use crate::transport::verbs::objects::{PortAttributes, Verb};
use crate::transport::verbs::shared_device::SharedDevice;

const LIMIT: Duration = Duration::from_secs(120);

/// What the devices were asked for: opened devices, protection domains and registrations.
fn asked_for(shim: &Shim) -> [u64; 3] {
    [Verb::OpenDevice, Verb::AllocPd, Verb::RegMr].map(|verb| shim.calls(verb))
}

/// The links of one more communicator, over devices that do not exist, and the memory that it registers.
fn communicator(rails: &[Rail], shim: &Shim, memory: [Piece; 2]) -> (UnconnectedVerbs, Arc<dyn Registrar>) {
    let device = |rail: &Rail| {
        let port = PortAttributes { active: true, lid: 1, mtu: 5, needs_global: false };
        (SharedDevice::open_inert(&rail.device, shim).expect("inert"), port)
    };
    let key = SecretKey::from_parts("test", &[]);
    let directory = LinkDirectory {
        me: 0,
        rails: vec![rails.to_vec(); 2],
        key: Box::new(move |_| key.clone()),
        out_of_band: Box::new(MemoryMessages::world(2).swap_remove(0)),
    };
    let registration = Registration::Auto;
    let options = VerbsOptions { registration, ..VerbsOptions::new(&Config::default()) };
    let devices = rails.iter().map(device).collect();
    let links = UnconnectedVerbs::over(devices, directory, &[1], options).expect("inert");
    let registrar = links.registrar();
    memory.into_iter().for_each(|piece| registrar.register(piece).expect("inert"));
    (links, registrar)
}

#[test]
fn the_tenth_communicator_opens_nothing_and_registers_its_own_memory_only() {
    let shim = Shim::none();
    let rails = ["inert0", "inert1"].map(|name| Rail { device: name.to_owned(), ..Rail::example() });
    let mut pool = vec![0; 10 * SUBCHUNK];
    let mut vector = vec![0; SUBCHUNK];
    let (pool, vector) = (piece(&mut pool), piece(&mut vector));
    let mut before = asked_for(&shim);
    let mut living = Vec::new();
    for number in 0..10 {
        // Its own slots, and a vector of the user that all communicators have registered.
        living.push(communicator(&rails, &shim, [pool.narrow(number * SUBCHUNK, SUBCHUNK), vector]));
        let now = asked_for(&shim);
        let new: [u64; 3] = std::array::from_fn(|at| now[at] - before[at]);
        // By rail: both sides of the control buffers and the slots; the first also the vector, and four to
        // measure the time.
        let expected = if number == 0 { [2, 2, 2 * (3 + 1 + 4)] } else { [0, 0, 2 * 3] };
        assert_eq!(new, expected, "communicator {number}");
        before = now;
    }
    drop(living);
    let _later = communicator(&rails, &shim, [pool, vector]);
    assert_eq!(asked_for(&shim)[..2], [4, 4], "the devices were closed with the last communicator");
}

/// Entries of `/proc/self/fd`.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("/proc is mounted").count()
}

#[test]
fn worlds_of_one_process_exchange_messages_over_the_same_devices() {
    const WORLDS: usize = 5;
    on_rails(LIMIT, |rails| {
        let shim = Shim::none();
        let setup =
            LinkSetup { shares_devices: true, shim: shim.clone(), ..LinkSetup::over(rails, rails.len()) };
        let mut worlds = Vec::new();
        let mut open = vec![descriptors()];
        for _ in 0..WORLDS {
            worlds.push(setup.link().expect("all devices work"));
            open.push(descriptors());
        }
        let opened = [Verb::OpenDevice, Verb::AllocPd].map(|verb| shim.calls(verb));
        assert_eq!(opened, [rails.len() as u64; 2]);
        let added: Vec<usize> = open.windows(2).map(|pair| pair[1] - pair[0]).collect();
        println!("descriptors of each world of two ranks over {} rails: {added:?}", rails.len());
        println!("memory regions of {WORLDS} worlds: {}", shim.calls(Verb::RegMr));
        assert!(added[1..].iter().all(|more| *more < added[0]), "{added:?}");
        // The worlds are busy at the same time, and end while others are.
        thread::scope(|scope| {
            for (number, ranks) in worlds.into_iter().enumerate() {
                scope.spawn(move || {
                    let lens = vec![SUBCHUNK, 10, 5000];
                    let act = |rank: &mut ConnectedRank| {
                        let mut heap = HeapMemory::default();
                        (1..2 + number as u64)
                            .try_for_each(|sequence| rank.exchange(sequence, &lens, &mut heap))
                    };
                    run_linked(ranks, act).into_iter().for_each(|outcome| outcome.expect("no failure"));
                });
            }
        });
    });
}
