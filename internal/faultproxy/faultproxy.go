// Package faultproxy is a TCP relay that misbehaves on demand: it delays, holds back, cuts, resets and refuses.
package faultproxy

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// Direction is one way through a proxy.
type Direction int

// Up is from the client to the server, Down the way back.
const (
	Up Direction = iota
	Down
)

// Faults are what a proxy does to its connections, old and new, until the next Set. The zero Faults are none.
type Faults struct {
	Refuse bool             // a new connection is reset at once. The listener stays, so that nobody else takes the port
	Hold   bool             // nothing passes, in either direction; what was held passes when this ends, as after lost packets
	Delay  [2]time.Duration // by Direction: each piece waits this long. Pieces do not overtake, so it also limits the rate
	// CutAfter, by Direction: the connection over which this many more bytes have passed, counted over all connections, is
	// reset, in both directions; then the fault is over. 0 is none.
	CutAfter [2]int64
}

// Proxy relays between clients and one server. Its methods may be called from any goroutine.
type Proxy struct {
	target string
	ln     net.Listener
	closed chan struct{}
	work   sync.WaitGroup // everything that Start and accept have started

	mu      sync.Mutex // guards what follows
	faults  Faults
	changed chan struct{} // closed and replaced by Set
	links   map[*link]struct{}
}

// link is one connection of a client, and ours to the server.
type link struct {
	client, server net.Conn
	swallowed      bool // guarded by Proxy.mu: nothing passes any more
	done           chan struct{}
	once           sync.Once
}

// end closes both sides. With reset the peers see a reset and lose what they have not read.
func (l *link) end(reset bool) {
	l.once.Do(func() {
		close(l.done)
		for _, c := range []net.Conn{l.client, l.server} {
			if tcp, ok := c.(*net.TCPConn); ok && reset {
				_ = tcp.SetLinger(0) // a connection that is gone already needs none
			}
			_ = c.Close()
		}
	})
}

// Start listens on addr (127.0.0.1:0 for any port) and relays to target, which need not be there yet.
func Start(addr, target string) (*Proxy, error) {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("fault proxy before %s: %w", target, err)
	}
	p := &Proxy{target: target, ln: ln, closed: make(chan struct{}), changed: make(chan struct{}), links: map[*link]struct{}{}}
	p.work.Go(p.accept)
	return p, nil
}

// Addr is host:port of the listener.
func (p *Proxy) Addr() string { return p.ln.Addr().String() }

// Set replaces the faults.
func (p *Proxy) Set(f Faults) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults = f
	close(p.changed)
	p.changed = make(chan struct{})
}

// Cut ends every connection: in order, or with a reset, which also throws away what is under way.
func (p *Proxy) Cut(reset bool) {
	for _, l := range p.all() {
		l.end(reset)
	}
}

// Swallow makes every connection of now silent for good, as when a peer's machine is gone: nothing passes, nothing ends. New
// connections are not affected.
func (p *Proxy) Swallow() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.swallowed = true
	}
	close(p.changed)
	p.changed = make(chan struct{})
}

// Connections is how many there are.
func (p *Proxy) Connections() int { return len(p.all()) }

func (p *Proxy) all() []*link {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make([]*link, 0, len(p.links))
	for l := range p.links {
		all = append(all, l)
	}
	return all
}

// Close ends the listener and every connection, and waits for them. It may be called twice.
func (p *Proxy) Close() {
	p.mu.Lock()
	select {
	case <-p.closed:
	default:
		close(p.closed)
	}
	p.mu.Unlock()
	_ = p.ln.Close()
	p.Cut(true)
	p.work.Wait()
}

func (p *Proxy) accept() {
	for {
		c, err := p.ln.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			time.Sleep(10 * time.Millisecond) // out of file descriptors: it may pass
			continue
		}
		p.work.Go(func() { p.relay(c) })
	}
}

// relay is the life of one connection.
func (p *Proxy) relay(client net.Conn) {
	p.mu.Lock()
	refuse := p.faults.Refuse
	p.mu.Unlock()
	var server net.Conn
	var err error
	if !refuse {
		server, err = net.DialTimeout("tcp", p.target, 10*time.Second)
	}
	if refuse || err != nil { // no server: the nearest to a refused connection that a listener can do
		if tcp, ok := client.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0)
		}
		_ = client.Close()
		return
	}
	l := &link{client: client, server: server, done: make(chan struct{})}
	p.mu.Lock()
	select {
	case <-p.closed:
		p.mu.Unlock()
		l.end(true)
		return
	default:
	}
	p.links[l] = struct{}{}
	p.mu.Unlock()

	var both sync.WaitGroup
	both.Go(func() { p.pump(l, Up, server, client) })
	both.Go(func() { p.pump(l, Down, client, server) })
	both.Wait()
	l.end(false)
	p.mu.Lock()
	delete(p.links, l)
	p.mu.Unlock()
}

// pump copies one direction until an end or a fault.
func (p *Proxy) pump(l *link, d Direction, dst, src net.Conn) {
	buf := make([]byte, 32<<10)
	for {
		n, err := src.Read(buf)
		if !p.wait(l, d, n > 0) {
			return
		}
		pass, cut := p.pass(d, n)
		if pass > 0 {
			if _, err := dst.Write(buf[:pass]); err != nil {
				l.end(true)
				return
			}
		}
		switch {
		case cut:
			l.end(true)
			return
		case errors.Is(err, io.EOF):
			if tcp, ok := dst.(*net.TCPConn); ok {
				_ = tcp.CloseWrite() // the other direction may go on
			}
			return
		case err != nil:
			l.end(true)
			return
		}
	}
}

// wait returns when a piece, or the end of the stream, may pass; false when the connection has ended.
func (p *Proxy) wait(l *link, d Direction, piece bool) bool {
	delayed := !piece
	for {
		p.mu.Lock()
		f, changed, swallowed := p.faults, p.changed, l.swallowed
		p.mu.Unlock()
		switch {
		case swallowed:
			<-l.done
			return false
		case f.Hold:
			select {
			case <-changed:
			case <-l.done:
				return false
			}
		case !delayed && f.Delay[d] > 0:
			delayed = true
			t := time.NewTimer(f.Delay[d])
			select {
			case <-t.C:
			case <-changed: // the old delay is over with the old faults; a hold may have come
			case <-l.done:
				t.Stop()
				return false
			}
			t.Stop()
		default:
			select {
			case <-l.done:
				return false
			default:
				return true
			}
		}
	}
}

// pass tells how many of n bytes may pass and whether the connection is then cut.
func (p *Proxy) pass(d Direction, n int) (pass int, cut bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	left := &p.faults.CutAfter[d]
	switch {
	case *left == 0 || n == 0:
		return n, false
	case int64(n) < *left:
		*left -= int64(n)
		return n, false
	}
	pass, *left = int(*left), 0
	return pass, true
}
