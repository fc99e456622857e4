//! What a cubin, an ELF file, says of its kernels.

/// The beginnings of names of sections with the shared memory of a kernel.
const SHARED: &[u8] = b".nv.shared.";

/// The most bytes of shared memory that a kernel declares; 0 for what is not a cubin.
pub(super) fn static_shared(image: &[u8]) -> u32 {
    let sizes = sections(image).into_iter().flatten();
    let shared = sizes.filter(|(name, _)| name.starts_with(SHARED)).map(|(_, bytes)| bytes);
    shared.max().map_or(0, |bytes| u32::try_from(bytes).unwrap_or(u32::MAX))
}

/// Names and sizes of all sections of a 64-bit ELF file.
fn sections(image: &[u8]) -> Option<Vec<(&[u8], u64)>> {
    let number = |at: usize, bytes: usize| {
        let bytes = image.get(at..at + bytes)?;
        Some(bytes.iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte)))
    };
    if !image.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (table, size, count) = (number(40, 8)? as usize, number(58, 2)? as usize, number(60, 2)? as usize);
    let header = |section: usize| table + section * size;
    let names = number(header(number(62, 2)? as usize) + 24, 8)? as usize;
    let section = |section: usize| {
        let name = image.get(names + number(header(section), 4)? as usize..)?;
        let end = name.iter().position(|byte| *byte == 0)?;
        Some((&name[..end], number(header(section) + 32, 8)?))
    };
    (0..count).map(section).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ELF file with sections of these names and sizes; the last one holds the names.
    fn elf(sections: &[(&str, u64)]) -> Vec<u8> {
        let mut image = vec![0; 64];
        image[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let mut names = Vec::new();
        let starts: Vec<u32> = sections
            .iter()
            .map(|(name, _)| {
                let start = names.len() as u32;
                names.extend(name.bytes().chain([0]));
                start
            })
            .collect();
        image.extend(&names);
        let table = image.len() as u64;
        for (start, (_, bytes)) in starts.iter().zip(sections) {
            let mut header = [0; 64];
            header[..4].copy_from_slice(&start.to_le_bytes());
            header[24..32].copy_from_slice(&64u64.to_le_bytes());
            header[32..40].copy_from_slice(&bytes.to_le_bytes());
            image.extend(header);
        }
        image[40..48].copy_from_slice(&table.to_le_bytes());
        image[58..60].copy_from_slice(&64u16.to_le_bytes());
        image[60..62].copy_from_slice(&(sections.len() as u16).to_le_bytes());
        image[62..64].copy_from_slice(&(sections.len() as u16 - 1).to_le_bytes());
        image
    }

    #[test]
    fn the_largest_shared_memory_of_a_kernel_is_found() {
        let image =
            elf(&[(".text.a", 9_000), (".nv.shared.a", 512), (".nv.shared.b", 4_096), (".shstrtab", 60)]);
        assert_eq!(static_shared(&image), 4_096);
        assert_eq!(static_shared(&elf(&[(".text.a", 9_000), (".shstrtab", 20)])), 0);
        for cut in 0..image.len() {
            assert!(static_shared(&image[..cut]) <= 4_096);
        }
        assert_eq!(static_shared(b"// PTX"), 0);
    }
}
