//! Attention on the tensor cores: for which heads there is a program, how its tiles are cut, and how much shared memory a
//! block needs. The kernels get these numbers from here.

/// Threads of a warpgroup, and its rows of a tile.
const GROUP: usize = 128;
const GROUP_ROWS: usize = 64;
/// Panels of tiles begin at multiples of it.
const ALIGNMENT: usize = 1024;
/// Bytes of the places where threads that copy and threads that compute meet.
const MEETINGS: usize = 128;
/// Elements of a head whose gradients of keys and values a block has.
const WIDTH: usize = 128;

/// The longest heads that programs are made for; shorter ones are padded in shared memory only.
const HEADS: [usize; 3] = [64, 128, 256];

/// A kernel's tiles.
#[derive(Debug, Clone, Copy)]
struct Cut {
    /// Warpgroups that compute in a block.
    groups: usize,
    /// Rows of the other side that are in shared memory at a time, twice.
    others: usize,
}

const fn cut(groups: usize, others: usize) -> Cut {
    Cut { groups, others }
}

/// By the program's head: forward, dq, and dk with dv. A block has up to 227 KiB of shared memory.
const HOPPER: [[Cut; 3]; 3] = [
    [cut(2, 128), cut(2, 128), cut(2, 128)],
    [cut(2, 128), cut(1, 64), cut(2, 64)],
    [cut(2, 64), cut(1, 64), cut(1, 64)],
];

/// For cards with 99 KiB; heads above 128 elements need more.
const OTHERS: [[Cut; 3]; 3] = [
    [cut(2, 64), cut(2, 64), cut(2, 64)],
    [cut(2, 64), cut(1, 64), cut(1, 64)],
    [cut(1, 32), cut(1, 32), cut(1, 32)],
];

/// How attention is cut for heads of up to so many elements. Sums run tile by tile, so a cut decides about bits: it
/// depends on the head and on the generation of the card alone.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cuts {
    head: usize,
    hopper: bool,
    forward: Cut,
    dq: Cut,
    dkv: Cut,
}

/// How a kernel is launched.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    /// Rows of a block's own side.
    pub(super) rows: usize,
    pub(super) threads: u32,
    /// Bytes of shared memory.
    pub(super) shared: u32,
}

/// The program's head for a head of `head_dim` elements; `None` where it is too long or not a multiple of 16 bytes.
pub(super) fn program_head(head_dim: usize) -> Option<usize> {
    let fits = |head: &usize| head_dim <= *head;
    HEADS.into_iter().find(fits).filter(|_| head_dim > 0 && head_dim.is_multiple_of(8))
}

/// Whether the compiler is told to use what is only Hopper's.
pub(super) fn is_hopper(arch: &str) -> bool {
    arch == "sm_90a"
}

impl Cuts {
    pub(super) fn of(head: usize, hopper: bool) -> Self {
        let place = HEADS.into_iter().position(|known| known == head).expect("one of the programs' heads");
        let [forward, dq, dkv] = if hopper { HOPPER[place] } else { OTHERS[place] };
        Self { head, hopper, forward, dq, dkv }
    }

    /// What the program begins with.
    pub(super) fn text(&self) -> String {
        let Self { head, forward, dq, dkv, .. } = self;
        let numbers = [
            ("HEAD", *head),
            ("FORWARD_GROUPS", forward.groups),
            ("FORWARD_KEYS", forward.others),
            ("DQ_GROUPS", dq.groups),
            ("DQ_KEYS", dq.others),
            ("DKV_GROUPS", dkv.groups),
            ("DKV_QUERIES", dkv.others),
        ];
        numbers.map(|(name, number)| format!("#define {name} {number}\n")).concat()
    }

    /// Its functions: forward, dq, and dk with dv.
    pub(super) fn parts(&self) -> [Part; 3] {
        // A tile of the own side or two; keys and values, or queries and gradients, twice; where threads meet.
        let part = |cut: Cut, own: usize, more: usize| {
            let rows = cut.groups * GROUP_ROWS;
            let copying = if self.hopper { GROUP } else { 0 };
            let tiles = 2 * self.head * (own * rows + 4 * cut.others);
            Part {
                rows,
                threads: (cut.groups * GROUP + copying) as u32,
                shared: (ALIGNMENT + tiles + more + MEETINGS) as u32,
            }
        };
        // Two statistics a query, twice.
        [part(self.forward, 1, 0), part(self.dq, 2, 0), part(self.dkv, 2, 16 * self.dkv.others)]
    }

    /// Blocks that share the columns of dk and dv.
    pub(super) const fn shares(&self) -> usize {
        self.head.div_ceil(WIDTH)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_has_the_shortest_program_that_holds_it() {
        let found = [8, 64, 72, 128, 136, 256, 264, 20, 0].map(program_head);
        let (none, short, middle, long) = (None, Some(64), Some(128), Some(256));
        assert_eq!(found, [short, short, middle, middle, long, long, none, none, none]);
    }

    #[test]
    fn tiles_fit_into_the_shared_memory_of_their_cards() {
        for head in HEADS {
            let most = |hopper: bool| {
                let parts = Cuts::of(head, hopper).parts();
                parts.into_iter().map(|part| part.shared).max().unwrap()
            };
            assert!(most(true) <= 227 << 10, "{head}: {}", most(true));
            // An A100 has 163 KiB, smaller cards of its generation 99.
            assert!(most(false) <= if head > 128 { 163 << 10 } else { 99 << 10 }, "{head}: {}", most(false));
        }
    }

    #[test]
    fn the_kernels_are_told_how_they_are_cut() {
        let text = Cuts::of(128, true).text();
        assert!(text.contains("#define HEAD 128\n") && text.contains("#define DKV_QUERIES 64\n"), "{text}");
    }
}
