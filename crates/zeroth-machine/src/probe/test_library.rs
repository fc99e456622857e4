//! Shared libraries made for tests, as a vendor's library looks from outside.
#![allow(unsafe_code, reason = "a test calls a function of a library by its name")]

/// Compiles C to a shared library: what a vendor's library looks like from outside.
pub(super) fn compile(source: &str, library: &std::path::Path, defines: &[&str]) {
    let folder = library.parent().unwrap();
    std::fs::create_dir_all(folder).unwrap();
    let file = library.with_extension("c");
    std::fs::write(&file, source).unwrap();
    let output = std::process::Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(library)
        .args(defines.iter().map(|define| format!("-D{define}")))
        .arg(&file)
        .output()
        .expect("Rust itself links with cc");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::remove_file(file).unwrap();
}

mod tests {
    use std::ffi::OsStr;

    use zeroth_cuda::SharedLibrary;

    use super::compile;

    #[test]
    fn the_loader_says_what_is_missing() {
        let error = SharedLibrary::open(OsStr::new("libzeroth-absent.so.1")).err().unwrap();
        assert!(error.contains("libzeroth-absent.so.1"), "{error}");

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libsmall.so");
        compile("int seven(void) { return 7; }", &path, &[]);
        let library = SharedLibrary::open(path.as_os_str()).unwrap();
        // SAFETY: the type is that of the source above.
        let seven = unsafe { library.function::<extern "C" fn() -> i32>("seven") };
        assert_eq!(seven.unwrap()(), 7);
        // SAFETY: as above, and nothing of that name is there to be called.
        let eight = unsafe { library.function::<extern "C" fn() -> i32>("eight") };
        assert!(eight.unwrap_err().contains("eight"));
    }
}
