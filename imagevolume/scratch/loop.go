package scratch

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// attempts bounds how often a device is taken by somebody else between asking
// which is free and taking it.
const attempts = 100

// attach returns a loop device of the file, which the kernel frees when the
// last that has it open or mounted lets it go. It reads and writes around the
// page cache where the file's disk can, so that nothing is cached twice.
func attach(file *os.File) (*os.File, error) {
	control, err := openControl()
	if err != nil {
		return nil, err
	}
	defer control.Close()
	config := unix.LoopConfig{Fd: uint32(file.Fd()), Size: blockSize} //nolint:gosec // a descriptor is small
	config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO
	copy(config.Info.File_name[:], "ocihold scratch")
	for range attempts {
		number, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, noLoop(err)
		}
		device, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", number), os.O_RDWR, 0)
		if err != nil {
			return nil, noLoop(err)
		}
		err = unix.IoctlLoopConfigure(int(device.Fd()), &config)
		if err == nil {
			return device, nil
		}
		device.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, fmt.Errorf("set up loop device %d: %w", number, err)
		}
	}
	return nil, noLoop(unix.EBUSY)
}

// openControl opens the device that tells of free loop devices.
func openControl() (*os.File, error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, noLoop(err)
	}
	return control, nil
}

// noLoop tells the fix for the likely reasons.
func noLoop(err error) error {
	err = fmt.Errorf("find a free loop device: %w", err)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("%w: %w; load the kernel's module loop, and let Ocihold have the host's /dev", ErrUnsupported, err)
	}
	return err
}
