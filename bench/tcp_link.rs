//! Measures one TCP link over loopback: GB/s of large messages in one and both directions, by sockets per
//! link, and half the round-trip time of 8 bytes.
//!
//! Two threads drive the two ends, spinning and yielding. Every figure is the median of `ROUNDS`.

#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]
#![allow(unsafe_code, reason = "pieces are made of the benchmark's own buffers")]

use flexring::Result;
use flexring::internal::memory::Piece;
use flexring::internal::transport::tcp::{LinkOptions, Listener, Tcp};
use flexring::internal::transport::{Event, Events, PostedTransport, Transport};
use flexring_core::call::{Call, Collective};
use flexring_core::dtype::DType;
use flexring_core::fault::Fault;
use flexring_core::secret::SecretKey;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ptr::NonNull;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

const MESSAGE: usize = 512 << 10;
/// Messages in a buffer: so many that it does not fit into a cache, like a gradient.
const PLACES: usize = 128;
const MESSAGES: usize = 4096;
const TURNS: usize = 20_000;
const ROUNDS: usize = 5;

/// One end of the link, with buffers of `PLACES` messages.
struct End {
    tcp: Tcp,
    peer: usize,
    sequence: u64,
    outbox: Vec<u8>,
    inbox: Vec<u8>,
    events: Events,
}

fn piece(bytes: &mut [u8], at: usize, len: usize) -> Piece {
    // SAFETY: the buffer lives as long as the link, and messages in flight do not overlap in it.
    unsafe { Piece::new(NonNull::from(&mut bytes[at]), len) }
}

impl End {
    fn connect(listener: Listener, me: usize, peer: SocketAddr, sockets: usize) -> Result<Self> {
        let peers = [(1 - me, vec![peer])];
        let deadline = Instant::now() + Duration::from_secs(10);
        let key = SecretKey::from_parts("benchmark", &[]);
        let options = LinkOptions {
            connect_timeout: Duration::from_secs(10),
            sockets_per_link: sockets,
            is_encrypted: std::env::args().any(|argument| argument == "--tls"),
        };
        let tcp = Tcp::connect(listener, me, &peers, &|_| key.clone(), options, deadline, &Fault::new())?;
        let room = PLACES * MESSAGE;
        Ok(Self {
            tcp,
            peer: 1 - me,
            sequence: 0,
            outbox: vec![1; room],
            inbox: vec![0; room],
            events: Events::with_capacity(1024),
        })
    }

    /// Begins a call and waits until the peer has entered it.
    fn begin(&mut self) -> Result<()> {
        self.sequence += 1;
        self.tcp.begin(self.sequence);
        let call = Call {
            sequence: self.sequence,
            collective: Collective::AllReduce,
            dtype: DType::U8,
            op: 0,
            root: 0,
            count: 0,
            program: 0,
            on_gpu: false,
            factor: 1.0,
        };
        self.tcp.announce(self.peer, &call)?;
        while self.wait()? != (0, 0) {}
        Ok(())
    }

    /// Spins until there is an event. The numbers of messages sent and received.
    fn wait(&mut self) -> Result<(usize, usize)> {
        while self.events.is_empty() {
            if !self.tcp.poll(&mut self.events)? {
                thread::yield_now();
            }
        }
        let sent = |event: &Event| matches!(event, Event::SendComplete { .. });
        let received = |event: &Event| matches!(event, Event::RecvComplete { .. });
        let counts = (
            self.events.iter().filter(|event| sent(event)).count(),
            self.events.iter().filter(|event| received(event)).count(),
        );
        self.events.clear();
        Ok(counts)
    }

    /// Sends and receives messages of `MESSAGE` bytes as fast as the window allows.
    fn stream(&mut self, sends: usize, recvs: usize) -> Result<()> {
        let window = self.tcp.window();
        let (mut sends_posted, mut sent, mut recvs_posted, mut received) = (0, 0, 0, 0);
        while sent < sends || received < recvs {
            while recvs_posted < recvs && recvs_posted - received < window {
                let place = piece(&mut self.inbox, recvs_posted % PLACES * MESSAGE, MESSAGE);
                self.tcp.post_recv(self.peer, place)?;
                recvs_posted += 1;
            }
            while sends_posted < sends && sends_posted - sent < window {
                let place = piece(&mut self.outbox, sends_posted % PLACES * MESSAGE, MESSAGE);
                self.tcp.send(self.peer, place)?;
                sends_posted += 1;
            }
            let (more_sent, more_received) = self.wait()?;
            sent += more_sent;
            received += more_received;
        }
        Ok(())
    }

    /// Exchanges `TURNS` messages in each direction; `first` sends first.
    fn ping_pong(&mut self, first: bool) -> Result<()> {
        let size = 8;
        for _ in 0..TURNS {
            self.tcp.post_recv(self.peer, piece(&mut self.inbox, 0, size))?;
            if first {
                self.tcp.send(self.peer, piece(&mut self.outbox, 0, size))?;
            }
            let mut sent = 0;
            loop {
                let (more, received) = self.wait()?;
                sent += more;
                if received > 0 {
                    break;
                }
            }
            if !first {
                self.tcp.send(self.peer, piece(&mut self.outbox, 0, size))?;
            }
            while sent < 1 {
                sent += self.wait()?.0;
            }
        }
        Ok(())
    }
}

/// The median time that `work` takes at both ends at once.
fn time(sockets: usize, work: impl Fn(&mut End, usize) -> Result<()> + Sync) -> Result<Duration> {
    let mut listeners = Vec::new();
    let mut endpoints = Vec::new();
    for _ in 0..2 {
        let listener = Listener::bind(&[IpAddr::V4(Ipv4Addr::LOCALHOST)], None)?;
        endpoints.push(listener.endpoints()[0]);
        listeners.push(listener);
    }
    let barrier = Barrier::new(2);
    let run = |me: usize, listener: Listener, peer: SocketAddr| -> Result<Duration> {
        let mut end = End::connect(listener, me, peer, sockets)?;
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            end.begin()?;
            barrier.wait();
            let began = Instant::now();
            work(&mut end, me)?;
            barrier.wait();
            times.push(began.elapsed());
        }
        times.sort();
        Ok(times[ROUNDS / 2])
    };
    thread::scope(|scope| {
        let (one, zero) = (listeners.pop(), listeners.pop());
        let ends = [(0, zero, endpoints[1]), (1, one, endpoints[0])].map(|(me, listener, peer)| {
            let run = &run;
            scope.spawn(move || run(me, listener.expect("two were bound"), peer))
        });
        let times = ends.map(|end| end.join().expect("no panic"));
        times.into_iter().try_fold(Duration::ZERO, |longest, time| Ok(longest.max(time?)))
    })
}

fn main() -> Result<()> {
    println!("{:>8} {:>14} {:>16}", "sockets", "one way GB/s", "both ways GB/s");
    for sockets in [1, 2, 4] {
        let bytes = (MESSAGES * MESSAGE) as f64;
        let one_way = time(sockets, |end, me| match me {
            0 => end.stream(MESSAGES, 0),
            _ => end.stream(0, MESSAGES),
        })?;
        let both_ways = time(sockets, |end, _| end.stream(MESSAGES, MESSAGES))?;
        println!(
            "{sockets:>8} {:>14.2} {:>16.2}",
            bytes / one_way.as_secs_f64() / 1e9,
            2.0 * bytes / both_ways.as_secs_f64() / 1e9
        );
    }
    let turns = time(1, |end, me| end.ping_pong(me == 0))?;
    println!("half round trip of 8 bytes: {:.2} us", turns.as_secs_f64() * 1e6 / (2 * TURNS) as f64);
    Ok(())
}
