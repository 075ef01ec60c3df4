package faultproxy

import (
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"
)

// echo is a server that says back what it hears.
func echo(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(c, c)
				_ = c.Close()
			}()
		}
	}()
	return ln.Addr().String()
}

func start(t *testing.T, target string) *Proxy {
	t.Helper()
	p, err := Start("127.0.0.1:0", target)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

func dial(t *testing.T, p *Proxy) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	return c
}

// say writes text and returns what comes back of it.
func say(c net.Conn, text string) (string, error) {
	if _, err := io.WriteString(c, text); err != nil {
		return "", err
	}
	b := make([]byte, len(text))
	n, err := io.ReadFull(c, b)
	return string(b[:n]), err
}

func want(t *testing.T, c net.Conn, text string) {
	t.Helper()
	if got, err := say(c, text); err != nil || got != text {
		t.Fatalf("said %q, heard %q, %v", text, got, err)
	}
}

func TestRelay(t *testing.T) {
	p := start(t, echo(t))
	c := dial(t, p)
	want(t, c, "hello")
	if n := p.Connections(); n != 1 {
		t.Errorf("%d connections, want 1", n)
	}
	// A client that has said all still hears the rest.
	if _, err := io.WriteString(c, "last words"); err != nil {
		t.Fatal(err)
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(c); err != nil || string(b) != "last words" {
		t.Errorf("after CloseWrite heard %q, %v", b, err)
	}
}

func TestCutAfterCountsBytesInEitherDirection(t *testing.T) {
	for _, d := range []Direction{Up, Down} {
		p := start(t, echo(t))
		c := dial(t, p)
		want(t, c, "one")
		var f Faults
		f.CutAfter[d] = 5
		p.Set(f)
		got, err := say(c, "0123456789")
		if err == nil || !strings.HasPrefix("01234", got) {
			t.Errorf("direction %d: heard %q, %v, want at most 01234 and an error", d, got, err)
		}
		want(t, dial(t, p), "a fault that is over") // the next connection lives
	}
}

func TestHoldPassesOnWhatItHeldAndSwallowDoesNot(t *testing.T) {
	p := start(t, echo(t))
	c := dial(t, p)
	want(t, c, "one")
	p.Set(Faults{Hold: true})
	heard := make(chan error, 1)
	go func() {
		_, err := say(c, "two")
		heard <- err
	}()
	select {
	case err := <-heard:
		t.Fatalf("heard through a hold: %v", err)
	case <-time.After(30 * time.Millisecond): // too short a wait only makes the test weaker
	}
	p.Set(Faults{})
	if err := <-heard; err != nil {
		t.Fatalf("after the hold: %v", err)
	}

	p.Swallow()
	if err := c.SetDeadline(time.Now().Add(30 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	var timeout net.Error
	if got, err := say(c, "three"); !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("heard %q, %v of a swallowed connection, want silence", got, err)
	}
	want(t, dial(t, p), "four")
}

func TestRefuseCutAndNobodyThere(t *testing.T) {
	p := start(t, echo(t))
	c := dial(t, p)
	want(t, c, "one")
	p.Set(Faults{Refuse: true})
	want(t, c, "old connections live")
	refused(t, p)
	p.Set(Faults{})
	for _, reset := range []bool{false, true} {
		c := dial(t, p)
		want(t, c, "three")
		p.Cut(reset)
		if got, err := say(c, "four"); err == nil {
			t.Errorf("heard %q of a cut connection", got)
		}
	}
	refused(t, start(t, "127.0.0.1:1"))
}

// refused wants a connection that fails, or one that is no use.
func refused(t *testing.T, p *Proxy) {
	t.Helper()
	c, err := net.Dial("tcp", p.Addr())
	if err != nil {
		return
	}
	defer func() { _ = c.Close() }()
	if got, err := say(c, "two"); err == nil {
		t.Errorf("heard %q of a proxy that refuses", got)
	}
}

func TestDelay(t *testing.T) {
	p := start(t, echo(t))
	c := dial(t, p)
	want(t, c, "one")
	p.Set(Faults{Delay: [2]time.Duration{Up: 20 * time.Millisecond, Down: 30 * time.Millisecond}})
	began := time.Now()
	want(t, c, "two")
	if took := time.Since(began); took < 50*time.Millisecond {
		t.Errorf("took %s, want at least 50ms", took)
	}
}

func TestCloseEndsEverything(t *testing.T) {
	p := start(t, echo(t))
	c := dial(t, p)
	want(t, c, "one")
	p.Set(Faults{Hold: true})
	if _, err := io.WriteString(c, "held"); err != nil {
		t.Fatal(err)
	}
	p.Close()
	p.Close()
	if _, err := io.ReadAll(c); err == nil {
		t.Error("a connection of a closed proxy ended in order, want a reset")
	}
}
