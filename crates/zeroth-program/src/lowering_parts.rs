//! What lowering depends on, part by part: ranks compare it before the first step, because they exchange bytes by offsets into
//! each other's arenas.

use std::fmt::{self, Write as _};

use zeroth_kernel::Tier;

use crate::{BufferId, Category, Compiled, PlacedBuffer, SectionMemory};

/// A part of a compiled program that must be equal on all ranks of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoweringPart {
    /// Its name in messages.
    pub name: String,
    /// Its value, of long ones a count and a digest.
    pub value: String,
}

/// A part that is not the same on all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoweringDifference {
    /// Its name.
    pub name: String,
    /// Every value, and the ranks that have it.
    pub values: Vec<(String, Vec<usize>)>,
}

/// FNV-1a of what is written to it: the same in every process of one build.
struct Digest(u64);

impl Digest {
    fn of(what: impl FnOnce(&mut Self) -> fmt::Result) -> Self {
        let mut digest = Self(0xcbf2_9ce4_8422_2325);
        // It fails only if a value's own formatting does, the same on every rank.
        let _ = what(&mut digest);
        digest
    }
}

impl fmt::Write for Digest {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        Ok(())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "digest {:016x}", self.0)
    }
}

impl Compiled {
    /// Everything that lowering depends on, causes before their effects.
    pub fn lowering_parts(&self) -> Vec<LoweringPart> {
        let (program, memory) = (&self.program, &self.memory);
        let mut parts = Vec::new();
        let mut add = |name: String, value: String| parts.push(LoweringPart { name, value });
        let named = |section: &SectionMemory| section.kind.name();
        add("the world".to_owned(), format!("{:?}, hpz {}", program.layout.world, program.hpz));
        add(
            "the ZeRO stage and the micro-batches of a step".to_owned(),
            format!("stage {}, {} micro-batch(es)", program.stage, program.accumulation),
        );
        add(
            "the dtypes".to_owned(),
            format!(
                "compute {}, communication {}, gradients {}, moments {}{}",
                program.types.compute,
                program.types.communication,
                program.grad_accum_dtype,
                program.moment_dtype,
                if program.stochastic_rounding { ", rounded stochastically" } else { "" },
            ),
        );
        add("the optimizer".to_owned(), format!("{:?}", program.optimizer));
        let flats = Digest::of(|to| write!(to, "{:?} {:?}", program.layout.flats, program.residency));
        add("the sharding".to_owned(), format!("{} flats, {flats}", program.layout.flats.len()));
        add("the rows of micro-batches".to_owned(), format!("{:?}", self.row_sizes));
        for section in &program.sections {
            let all = Digest::of(|to| {
                section.instructions.iter().try_for_each(|i| write!(to, "{:?} {:?};", i.action, i.queue))
            });
            let count = section.instructions.len();
            add(format!("the {} section", section.kind.name()), format!("{count} instructions, {all}"));
        }
        for section in &memory.sections {
            let is_scratch = |placed: &&PlacedBuffer| matches!(placed.buffer.id, BufferId::Scratch(_));
            let scratch: u64 =
                section.buffers.iter().filter(is_scratch).map(|placed| placed.buffer.bytes).sum();
            add(format!("the scratch of kernels in the {} section", named(section)), bytes(scratch));
        }
        add("the buffers of all sections".to_owned(), placement(&memory.static_buffers));
        for section in &memory.sections {
            add(format!("the buffers of the {} section", named(section)), placement(&section.buffers));
            let waits = Digest::of(|to| write!(to, "{:?} {:?}", section.waits, section.cross_step_waits));
            add(format!("the waits of the {} section", named(section)), waits.to_string());
        }
        for tier in Tier::ALL {
            let of = |category| memory.peak(tier, category);
            let [parameters, gradients, optimizer] =
                [Category::Parameters, Category::Gradients, Category::Optimizer].map(of);
            add(
                format!("the arena of the {}", tier.name()),
                format!(
                    "{} (parameters {parameters}, gradients {gradients}, optimizer {optimizer})",
                    bytes(memory.arena(tier))
                ),
            );
        }
        add("the mappings of other ranks' parameters".to_owned(), format!("{:?}", memory.views));
        parts
    }
}

/// Buffers with their offsets.
fn placement(buffers: &[PlacedBuffer]) -> String {
    let all = Digest::of(|to| {
        buffers.iter().try_for_each(|placed| {
            let buffer = placed.buffer;
            write!(to, "{:?} {:?} {}+{};", buffer.id, buffer.tier, placed.at, buffer.bytes)
        })
    });
    let total = buffers.iter().map(|placed| placed.buffer.bytes).sum();
    format!("{} in {} buffers, {all}", bytes(total), buffers.len())
}

fn bytes(bytes: u64) -> String {
    format!("{bytes} bytes")
}

impl LoweringDifference {
    /// The first part that ranks do not share, of all ranks' parts in rank order.
    pub fn first(all: &[Vec<LoweringPart>]) -> Option<Self> {
        let most = all.iter().map(Vec::len).max()?;
        (0..most).find_map(|place| {
            let name = all.iter().find_map(|parts| parts.get(place)).map(|part| part.name.clone())?;
            let mut values: Vec<(String, Vec<usize>)> = Vec::new();
            for (rank, parts) in all.iter().enumerate() {
                let value = match parts.get(place) {
                    Some(part) if part.name == name => part.value.clone(),
                    _ => "absent".to_owned(),
                };
                match values.iter_mut().find(|(known, _)| *known == value) {
                    Some((_, ranks)) => ranks.push(rank),
                    None => values.push((value, vec![rank])),
                }
            }
            (values.len() > 1).then_some(Self { name, values })
        })
    }
}

impl fmt::Display for LoweringDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.name)?;
        for (place, (value, ranks)) in self.values.iter().enumerate() {
            let numbers: Vec<String> = ranks.iter().map(ToString::to_string).collect();
            let word = if ranks.len() == 1 { "rank" } else { "ranks" };
            let between = if place == 0 { "" } else { "; " };
            write!(f, "{between}{value} on {word} {}", numbers.join(", "))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(name: &str, value: &str) -> LoweringPart {
        LoweringPart { name: name.to_owned(), value: value.to_owned() }
    }

    #[test]
    fn the_first_difference_names_every_value_and_its_ranks() {
        let one = vec![part("the dtypes", "bf16"), part("the arena of the device", "100 bytes")];
        let mut other = one.clone();
        assert_eq!(LoweringDifference::first(&[one.clone(), other.clone()]), None);
        other[1].value = "120 bytes".to_owned();
        let found = LoweringDifference::first(&[one.clone(), other.clone(), one.clone()]).unwrap();
        assert_eq!(
            found.to_string(),
            "the arena of the device: 100 bytes on ranks 0, 2; 120 bytes on rank 1"
        );
        let short = LoweringDifference::first(&[one[..1].to_vec(), one]).unwrap().to_string();
        assert!(short.contains("absent on rank 0; 100 bytes on rank 1"), "{short}");
        assert_eq!(LoweringDifference::first(&[]), None);
    }
}
