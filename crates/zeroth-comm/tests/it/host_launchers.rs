//! Launchers of ranks on several hosts, with shells in place of ranks and of ssh.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use zeroth_comm::launch::{
    ExitReason, HostExit, HostLauncher, HostReport, OutputLine, RankCommand, RankOutput, RemoteHost,
    run_on_hosts,
};

const INT: i32 = 2;
const TERM: i32 = 15;

/// What a rank that saves does: it ends by its own code a moment after it was asked to.
const SAVES: &str = "trap 'sleep 0.3; echo saved; exit 130' INT; trap 'sleep 0.3; echo saved; exit 143' TERM; \
                     echo up; while :; do sleep 0.05; done";

/// Output so far.
#[derive(Clone, Default)]
struct Said(Arc<Mutex<Vec<OutputLine>>>);

impl Said {
    fn output(&self) -> RankOutput {
        let said = Arc::clone(&self.0);
        RankOutput::Lines(Arc::new(move |line| said.lock().unwrap().push(line)))
    }

    fn count(&self, text: &str) -> usize {
        self.0.lock().unwrap().iter().filter(|line| line.text == text).count()
    }

    fn wait_for(&self, text: &str, times: usize) {
        let began = Instant::now();
        while self.count(text) < times {
            assert!(began.elapsed() < Duration::from_secs(30), "{text}: {:?}", self.0.lock().unwrap());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Runs two ranks of host 1 by a shell script, and does something meanwhile.
fn two_ranks(script: &str, meanwhile: impl FnOnce(Sender<RankCommand>, &Said) + Send) -> HostReport {
    let variables = ["2", "3"].map(|rank| vec![("RANK".to_owned(), rank.to_owned())]).into();
    let said = Said::default();
    let launcher = HostLauncher::new("/bin/sh", 2, variables).arguments(["-c", script]).output(said.output());
    let (sender, commands) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| meanwhile(sender, &said));
        launcher.run(&commands).unwrap()
    })
}

fn codes(report: &HostReport) -> Vec<ExitReason> {
    report.ranks.iter().map(|end| end.how).collect()
}

fn exited(code: i32) -> ExitReason {
    ExitReason::Exited { code }
}

#[test]
fn ranks_know_their_number_and_their_output_is_told_apart() {
    let said = Said::default();
    let kept = said.clone();
    let report = two_ranks("echo rank $RANK; exit 0", |sender, said| {
        said.wait_for("rank 3", 1);
        kept.0.lock().unwrap().extend(said.0.lock().unwrap().clone());
        drop(sender);
    });
    assert_eq!(report.common_code(), Some(0));
    for line in said.0.lock().unwrap().iter() {
        assert_eq!(line.text, format!("rank {}", line.rank));
    }
}

#[test]
fn a_signal_is_passed_on_once_and_ranks_may_save() {
    let report = two_ranks(SAVES, |sender, said| {
        said.wait_for("up", 2);
        sender.send(RankCommand::signal(INT).unwrap()).unwrap();
        said.wait_for("saved", 2);
        std::thread::sleep(Duration::from_secs(1));
    });
    assert_eq!((report.common_code(), report.first), (Some(130), None));
}

#[test]
fn ranks_that_nobody_controls_save_and_end() {
    let report = two_ranks(SAVES, |sender, said| {
        said.wait_for("up", 2);
        drop(sender);
    });
    assert_eq!(codes(&report), [exited(143), exited(143)]);
}

#[test]
fn a_kill_ends_ranks_that_do_not_listen() {
    let report = two_ranks("trap '' INT TERM; echo up; while :; do sleep 0.05; done", |sender, said| {
        said.wait_for("up", 2);
        sender.send(RankCommand::signal(TERM).unwrap()).unwrap();
        sender.send(RankCommand::Kill).unwrap();
        std::thread::sleep(Duration::from_secs(1));
    });
    assert_eq!(codes(&report), [ExitReason::Killed { signal: 9 }; 2]);
    assert_eq!(report.killed().count(), 0, "by the launcher");
}

#[test]
fn after_a_death_the_others_have_time_to_say_so() {
    let script = "if [ $RANK = 3 ]; then kill -9 $$; fi; sleep 2; echo rank 3 is dead; exit 1";
    let report = two_ranks(script, |sender, said| {
        said.wait_for("rank 3 is dead", 1);
        std::thread::sleep(Duration::from_millis(300));
        drop(sender);
    });
    assert_eq!(codes(&report), [exited(1), ExitReason::Killed { signal: 9 }]);
    assert_eq!(report.killed().map(|end| end.rank).collect::<Vec<_>>(), [3]);
    assert_eq!(report.first, Some(1));
}

/// Runs two hosts by a script in place of ssh, and does something meanwhile.
fn two_hosts(scripts: [&str; 2], meanwhile: impl FnOnce(Sender<RankCommand>, &Said) + Send) -> Vec<HostExit> {
    let host = |number: usize| RemoteHost {
        name: format!("n{number}"),
        command: ["/bin/sh", "-c", scripts[number]].map(Into::into).into(),
        opening: "secret".to_owned(),
    };
    let said = Said::default();
    let (sender, commands) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| meanwhile(sender, &said));
        run_on_hosts(&[host(0), host(1)], &said.output(), &commands).unwrap()
    })
}

/// The launcher of a host: says what it was told, and ends as it was asked to.
const LISTENS: &str = "read opening; echo up $opening; while read line; do echo $line; case $line in \
                       'signal 2') exit 130;; 'signal 15') exit 143;; kill) exit 1;; esac; done; echo alone; exit 143";

#[test]
fn commands_reach_every_host_and_secrets_its_standard_input() {
    let ends = two_hosts([LISTENS; 2], |sender, said| {
        said.wait_for("up secret", 2);
        sender.send(RankCommand::signal(INT).unwrap()).unwrap();
        said.wait_for("signal 2", 2);
        std::thread::sleep(Duration::from_millis(300));
    });
    assert!(
        ends.iter().all(|end| end.how == exited(130) && !end.is_first && !end.is_unreachable()),
        "{ends:?}"
    );
}

#[test]
fn hosts_that_do_not_notice_a_lost_one_are_asked_to_stop() {
    let began = Instant::now();
    // 255 is what ssh ends with when its connection is lost.
    let ends = two_hosts(["read opening; exit 255", LISTENS], |sender, said| {
        said.wait_for("signal 15", 1);
        drop(sender);
    });
    assert!(began.elapsed() >= Duration::from_secs(9), "{:?}", began.elapsed());
    assert!(ends[0].is_unreachable() && ends[0].is_first, "{ends:?}");
    assert_eq!((ends[1].how, ends[1].is_unreachable()), (exited(143), false));
}

#[test]
fn a_killed_remote_shell_is_a_lost_host() {
    let ends = two_hosts(["read opening; kill -9 $$", "read opening; sleep 1; exit 1"], |sender, _| {
        std::thread::sleep(Duration::from_secs(2));
        drop(sender);
    });
    assert!(ends[0].is_unreachable() && ends[0].is_first, "{ends:?}");
    assert!(!ends[1].is_unreachable() && !ends[1].is_first, "{ends:?}");
}

const LAUNCHER: &str = "ZEROTH_TEST_HOST_LAUNCHER";

#[test]
#[ignore = "the process that the next test starts and kills"]
fn launcher_of_sleeping_ranks() {
    let Ok(file) = std::env::var(LAUNCHER) else { return };
    let script = format!("echo $$ >>{file}; exec sleep 600");
    let variables = vec![Vec::new(), Vec::new()];
    let launcher = HostLauncher::new("/bin/sh", 0, variables).arguments(["-c", &script]);
    let (_sender, commands) = mpsc::channel();
    launcher.run(&commands).unwrap();
}

#[test]
fn ranks_die_with_their_launcher() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pids");
    let mut launcher = Command::new(std::env::current_exe().unwrap())
        .args(["host_launchers::launcher_of_sleeping_ranks", "--exact", "--ignored"])
        .env(LAUNCHER, &file)
        .spawn()
        .unwrap();
    let pids = || fs::read_to_string(&file).unwrap_or_default();
    let began = Instant::now();
    while pids().lines().count() < 2 {
        assert!(began.elapsed() < Duration::from_secs(30));
        std::thread::sleep(Duration::from_millis(10));
    }
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    let is_alive = |pid: &str| {
        let status = fs::read_to_string(Path::new("/proc").join(pid).join("stat")).unwrap_or_default();
        status.contains("(sleep)") && !status.contains(") Z ")
    };
    while pids().lines().any(is_alive) {
        assert!(began.elapsed() < Duration::from_mins(1));
        std::thread::sleep(Duration::from_millis(10));
    }
}
