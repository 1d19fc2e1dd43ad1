package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ocihold/ocihold/conf"
)

// stopLimit is how long the end may take. It takes long only where a disk does
// not answer, and then may never come.
const stopLimit = 20 * time.Second

// alone runs the only daemon of a run directory until it has ended, at most
// stopLimit after ctx.
func alone(ctx context.Context, config conf.Config, daemon func(context.Context) error) error {
	if err := claimRunDir(config.RunDir); err != nil {
		return err
	}
	unlock, err := lockRunDir(config.RunDir)
	if err != nil {
		return err
	}
	defer unlock() // also for the next one, where this process cannot end
	ended := make(chan error, 1)
	go func() { ended <- daemon(ctx) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-ended:
		return err
	case <-time.After(stopLimit):
		return fmt.Errorf("what was under way has not ended in %s, as where a disk does not answer: it is left", stopLimit)
	}
}

// claimRunDir makes the run directory, and refuses one that others could put
// things into, or lead elsewhere.
func claimRunDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make run directory: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return fmt.Errorf("look at run directory: %w", err)
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return fmt.Errorf("run directory %s is a link: remove it, or set run_dir to where it leads", dir)
	case st.Uid != uint32(os.Geteuid()): //nolint:gosec // never negative here
		return fmt.Errorf("run directory %s belongs to user %d, who could change what is there: remove it", dir, st.Uid)
	case st.Mode&0o022 != 0:
		return fmt.Errorf("run directory %s can be written by others: chmod go-w %s", dir, dir)
	}
	return nil
}

// lockPatience is how long the lock of a killed daemon may outlive it: until
// the program that it was about to start has been loaded.
const lockPatience = 2 * time.Second

// lockRunDir makes this the only daemon of its run directory. The lock ends
// with the process.
func lockRunDir(dir string) (unlock func(), err error) {
	file, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	err = unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	for end := time.Now().Add(lockPatience); errors.Is(err, unix.EWOULDBLOCK) && time.Now().Before(end); {
		<-time.After(lockPatience / 100)
		err = unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if err != nil {
		file.Close()
		return nil, fmt.Errorf("another ocihold runs in %s: stop it, or give this one a run_dir of its own: %w", dir, err)
	}
	return func() { file.Close() }, nil
}
