package child

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestMain is also the parent that TestChildDiesWithItsParent kills: it starts a child, says its id and waits.
func TestMain(m *testing.M) {
	if os.Getenv("CHILD_TEST_PARENT") == "" {
		os.Exit(m.Run())
	}
	p, err := Start(exec.Command("sleep", "1000"), func(string) {})
	if err != nil {
		panic(err)
	}
	fmt.Println(p.PID())
	select {}
}

func shell(t *testing.T, script string, line func(string)) *Process {
	t.Helper()
	p, err := Start(exec.Command("sh", "-c", script), line)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Kill(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func TestChildDiesWithItsParent(t *testing.T) {
	parent := exec.Command(os.Args[0])
	parent.Env = append(os.Environ(), "CHILD_TEST_PARENT=1")
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Sscan(line, &pid); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, 0); err != nil {
		t.Fatalf("the child does not live: %v", err)
	}
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait()
	for alive(pid) {
		time.Sleep(time.Millisecond)
	}
}

// alive tells a running process from one that is gone or only waits to be reaped.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

func TestStopAsksFirst(t *testing.T) {
	lines := make(chan string, 10)
	p := shell(t, `trap 'echo bye; exit 0' TERM; echo hello; while :; do sleep 0.01; done`, func(s string) { lines <- s })
	for p.output.String() != "hello" {
		time.Sleep(time.Millisecond)
	}
	p.Ready()
	if err := p.Signal(syscall.SIGSTOP); err != nil { // paused children hear it too
		t.Fatal(err)
	}
	for range 2 {
		if err := p.Stop(time.Minute); err != nil {
			t.Fatal(err)
		}
	}
	if got := <-lines; got != "bye" || p.err != nil {
		t.Fatalf("the child said %q and ended with %v, want bye and no error", got, p.err)
	}
}

func TestStopKillsWhoDoesNotListen(t *testing.T) {
	p := shell(t, `trap '' TERM; echo deaf; while :; do sleep 0.01; done`, func(string) {})
	for p.output.String() != "deaf" {
		time.Sleep(time.Millisecond)
	}
	if err := p.Stop(10 * time.Millisecond); err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.Done():
	default:
		t.Fatal("Stop returned before the child was gone")
	}
}

func TestFailureSaysHowItEndedAndWhatItSaid(t *testing.T) {
	p := shell(t, `for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo line $i; done; exit 3`, func(string) {})
	if got, want := p.Failure().Error(), "exit status 3: line 3; line 4;"; !strings.HasPrefix(got, want) || !strings.HasSuffix(got, "line 12") {
		t.Fatalf("Failure() = %q, want %q … line 12", got, want)
	}
	if _, err := Start(exec.Command("/no/such/program"), nil); err == nil || !strings.Contains(err.Error(), "/no/such/program") {
		t.Fatalf("Start = %v, want an error that names the program", err)
	}
}
