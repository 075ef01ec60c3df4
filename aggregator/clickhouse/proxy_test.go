package clickhouse

import (
	"bytes"
	"net"
	"net/url"
	"sync"
	"testing"
)

// fault is where a proxy cuts the connection of an insert.
type fault int

const (
	beforeData   fault = iota // the server sees nothing of it
	midBlock                  // the server sees its beginning
	beforeReply               // the server answers, and nobody hears it
	whileStoring              // nothing is cut: what follows happens beside the insert
)

func (f fault) String() string {
	return [...]string{"before data", "mid block", "before reply", "while storing"}[f]
}

// proxy passes TCP on, and cuts the connection of one insert when it is told to.
type proxy struct {
	listener net.Listener
	to       string

	mu    sync.Mutex
	armed bool
	fault fault
	mark  []byte // of the insert's request line
	then  func() // called at the cut, before the client can notice
	open  int    // connections
	cuts  int
}

// newProxy listens for clients of the server at rawURL until the test ends.
func newProxy(t testing.TB, rawURL string) (p *proxy, throughURL string) {
	t.Helper()
	u, err := url.Parse(rawURL)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p = &proxy{listener: l, to: u.Host}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() { p.pass(c) })
		}
	})
	t.Cleanup(func() { _ = l.Close(); all.Wait() })
	u.Host = l.Addr().String()
	return p, u.String()
}

// cutNext cuts the next insert into table, then calls then, which may be nil.
func (p *proxy) cutNext(f fault, table string, then func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.armed, p.fault, p.mark, p.then = true, f, []byte("query=INSERT+INTO+"+table+"+"), then
}

// hit says whether these bytes are the start of the insert to cut, and disarms.
func (p *proxy) hit(b []byte) (bool, fault, func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.armed || !bytes.Contains(b, p.mark) {
		return false, 0, nil
	}
	p.armed = false
	p.cuts++
	return true, p.fault, p.then
}

func (p *proxy) state() (open, cuts int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.open, p.cuts
}

func (p *proxy) add(n int) {
	p.mu.Lock()
	p.open += n
	p.mu.Unlock()
}

func (p *proxy) pass(client net.Conn) {
	p.add(1)
	defer p.add(-1)
	defer func() { _ = client.Close() }()
	server, err := net.Dial("tcp", p.to)
	if err != nil {
		return
	}
	defer func() { _ = server.Close() }()

	deaf := make(chan func(), 1) // holds what to do when the server answers, once the answer is to be lost
	var back sync.WaitGroup
	back.Go(func() {
		defer func() { _ = client.Close() }()
		buf := make([]byte, 64<<10)
		for {
			n, err := server.Read(buf)
			if err != nil {
				return
			}
			select {
			case then := <-deaf:
				then()
				return
			default:
			}
			if _, err := client.Write(buf[:n]); err != nil {
				return
			}
		}
	})
	buf := make([]byte, 32<<10)
	for {
		n, err := client.Read(buf)
		if err != nil {
			break
		}
		if hit, f, then := p.hit(buf[:n]); hit {
			if then == nil {
				then = func() {}
			}
			if f == whileStoring {
				back.Go(then)
				_, _ = server.Write(buf[:n])
				continue
			}
			if f == midBlock {
				if bytes.Index(buf[:n], []byte("\r\n\r\n"))+4 == n { // the head alone
					more, _ := client.Read(buf[n:])
					n += more
				}
				_, _ = server.Write(buf[:n-1])
			}
			if f != beforeReply {
				then()
				break
			}
			deaf <- then
		}
		if _, err := server.Write(buf[:n]); err != nil {
			break
		}
	}
	_ = server.Close()
	back.Wait()
}
